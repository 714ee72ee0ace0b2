"""One file per optimizer. Read `optimizer` first, which has what one step is."""

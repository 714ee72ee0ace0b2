"""One file per optimizer; `warmup` says when to freeze the variance."""

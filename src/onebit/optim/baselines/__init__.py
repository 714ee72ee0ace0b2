"""The methods that the papers compare with, one file each."""

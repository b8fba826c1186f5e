"""Who calls us. The only files that name other packages."""

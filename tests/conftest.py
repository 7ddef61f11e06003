"""Makes `import reference` work: pytest puts the folder of this file on the path."""

"""Media files to arrays, with limits checked before anything is decoded. Knows no model and no tensor library."""

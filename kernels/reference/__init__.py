"""Plain torch implementations: the fallback and the judge of every other backend."""

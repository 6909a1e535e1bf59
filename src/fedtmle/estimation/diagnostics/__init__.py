"""The diagnostics of a study: questions over its terms, of which each kind of study has each."""

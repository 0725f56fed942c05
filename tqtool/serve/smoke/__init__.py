"""``serve --smoke``: a server of its own, asked over HTTP as clients would."""

"""The dry run for people and for programs: text, JSON and HTML of one `Analysis`."""

"""What is known of errors: from public threads, by what they are about."""

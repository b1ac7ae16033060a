"""Images for Squeezebox's demonstration; NOTICE says whose they are."""

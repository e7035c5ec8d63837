"""Programs for those who develop this project; no distribution contains them."""

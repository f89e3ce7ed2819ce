"""What reports and pictures are made of: HTML, SVG, sparklines."""

"""Building blocks of reports and pictures: tables in terminals, HTML, SVG, sparklines."""

"""Tables, pages and exports of a study."""

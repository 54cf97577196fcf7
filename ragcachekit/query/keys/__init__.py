"""The keys of a query cache: checked, stored, and searched for the nearest."""

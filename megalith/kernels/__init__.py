"""Fast versions of frequent operations, most with a plain version that defines the result; and what they share, such as random draws."""

"""Which defaults adapt has, and how they do on tasks that did not choose them."""

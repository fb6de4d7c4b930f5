"""Acting: the policy, exploration, and the collector that turns environment steps into rows."""

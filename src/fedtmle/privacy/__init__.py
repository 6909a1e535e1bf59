"""What a server can infer from a silo's answers (section 4.3), under a stated attacker."""

"""Programs that others wrote, as their users run them against a server: do they run unchanged, and what do they say?"""

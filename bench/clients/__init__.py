"""Third-party programs, run against a server as their users run them: do they work, and what do they report?"""

"""Other people's programs: settings, passes and plug-ins for them. Nothing of theirs is imported
before it is used.
"""

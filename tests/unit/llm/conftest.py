from hypothesis import HealthCheck, settings

# How long an example takes says nothing on a machine that does other work at the same time.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

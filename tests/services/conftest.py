"""The services that these tests start themselves: one file a service, started once when a test first asks."""

from tests.services.browser import browser
from tests.services.mlflow_server import mlflow_server
from tests.services.object_storage import object_storage, s3
from tests.services.postgres import postgres

__all__ = ["browser", "mlflow_server", "object_storage", "postgres", "s3"]

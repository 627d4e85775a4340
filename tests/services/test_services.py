"""The services are the real ones: what the other tests of this folder lean on."""

import psycopg2
import pytest
from botocore.exceptions import ClientError


def test_postgres_keeps_what_was_committed_and_wants_the_password(postgres):
    postgres.create("kept")
    connection = postgres.connect("kept")
    with connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE numbers (n int PRIMARY KEY)")
        cursor.execute("INSERT INTO numbers VALUES (7)")
    connection.close()
    again = postgres.connect("kept")
    with again.cursor() as cursor:
        cursor.execute("SELECT n, version() FROM numbers")
        ((number, version),) = cursor.fetchall()
    again.close()
    assert number == 7 and version.startswith("PostgreSQL")
    with pytest.raises(psycopg2.OperationalError, match="password"):
        type(postgres)(postgres.port, "wrong").connect()


def test_object_storage_gives_back_bytes_honours_conditional_puts_and_refuses_a_wrong_key(object_storage):
    client = object_storage.client()
    client.create_bucket(Bucket="bytes")
    body = bytes(range(256)) * 40_000  # 10 MB: more than one chunk of the storage
    client.put_object(Bucket="bytes", Key="a/b", Body=body, IfNoneMatch="*")
    assert client.get_object(Bucket="bytes", Key="a/b")["Body"].read() == body
    assert object_storage.objects("bytes") == {"a/b": len(body)}
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket="bytes", Key="a/b", Body=b"other", IfNoneMatch="*")
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        object_storage.client(secret_key="wrong").list_buckets()


def test_mlflow_keeps_its_tables_in_postgres(mlflow_server, postgres):
    connection = postgres.connect("mlflow")
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM information_schema.tables WHERE table_name = 'model_versions'")
        assert cursor.fetchone() == (1,)
    connection.close()

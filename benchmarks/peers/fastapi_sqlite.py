"""A bare FastAPI route that commits request bodies to SQLite: `-m benchmarks.peers.fastapi_sqlite DATABASE PORT`."""

import json
import sqlite3
import sys
import threading
from typing import Any

import uvicorn
from fastapi import FastAPI

app = FastAPI()
_own = threading.local()


def database() -> sqlite3.Connection:
    """Return this thread's connection, with Trainshed's durability: WAL, and synced to disk before a commit returns."""
    if not hasattr(_own, "connection"):
        _own.connection = sqlite3.connect(sys.argv[1], timeout=30)
        _own.connection.execute("PRAGMA journal_mode=WAL")
        _own.connection.execute("PRAGMA synchronous=FULL")
    connection: sqlite3.Connection = _own.connection
    return connection


@app.post("/jobs", status_code=201)
def submit(body: dict[str, Any]) -> dict[str, str]:
    """Store a body without checks."""
    connection = database()
    number = connection.execute("INSERT INTO jobs (body) VALUES (?)", (json.dumps(body),)).lastrowid
    connection.commit()
    return {"id": str(number)}


def main() -> None:
    """Create the table and serve."""
    database().execute("CREATE TABLE jobs (id INTEGER PRIMARY KEY, body TEXT)")
    database().commit()
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")


if __name__ == "__main__":
    main()

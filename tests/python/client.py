#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Drives a daemon through strongSwan's Python module and prints what it answered.

Times and SPIs are masked by the caller; what belongs to one daemon only is left out here.
"""

import json
import sys
import threading

import vici


def text(value):
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {key: text(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [text(inner) for inner in value]
    return value


def show(what, value):
    # One "key=value" a line, so that the caller's masks apply.
    print(f"{what}: {json.dumps(text(value))}".replace('": "', "=").replace('"', ""))


def attempt(what, call):
    try:
        result = call()
        show(what, list(result) if hasattr(result, "__next__") else result)
    except vici.exception.CommandException as error:
        print(f"{what}: CommandException: {error}")


def main():
    connect = lambda: vici.Session(socket_to(sys.argv[1]))
    session = connect()

    version = text(session.version())
    print("version keys:", " ".join(key for key in version if key != "swanherd"))
    stats = text(session.stats())
    print("stats keys:", " ".join(key for key in stats if key in ("uptime", "workers", "queues", "scheduled", "ikesas")))
    show("ikesas", stats["ikesas"])
    show("conns", session.get_conns())
    show("shared", session.get_shared())
    attempt("list-conns", session.list_conns)

    # Events, seen by a second client.
    seen = []
    listening = threading.Event()

    def listen():
        events = connect().listen(["ike-updown", "child-updown", "child-rekey", "ike-rekey"], timeout=0.2)
        for label, message in events:
            listening.set()
            if label is not None:
                seen.append(label.decode())
            if stopping.is_set() and label is None:
                break

    stopping = threading.Event()
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    listening.wait(5)

    lines = list(session.initiate({"child": "c", "timeout": 20000}))
    print("initiate logs:", bool(lines) and all("msg" in line for line in lines))
    attempt("list-sas", session.list_sas)
    attempt("list-sas of nobody", lambda: session.list_sas({"ike": "nobody"}))
    attempt("rekey", lambda: session.rekey({"child": "c"}))
    attempt("rekey of nobody", lambda: session.rekey({"child": "nobody"}))
    attempt("initiate without a name", lambda: session.initiate({}))
    attempt("initiate of nobody", lambda: session.initiate({"child": "nobody"}))
    stopping.wait(1)
    lines = list(session.terminate({"ike": "t"}))
    print("terminate logs:", bool(lines) and all("msg" in line for line in lines))
    attempt("terminate again", lambda: session.terminate({"ike": "t"}))
    attempt("list-sas when down", session.list_sas)
    attempt("counters of nobody", lambda: session.get_counters({"name": "nobody"}))

    connection = {
        "second": {
            "version": "2",
            "remote_addrs": ["192.0.2.9"],
            "local": {"auth": "psk", "id": "left"},
            "remote": {"auth": "psk", "id": "right"},
            "children": {"net": {"remote_ts": ["10.9.0.0/16"], "start_action": "none"}},
        }
    }
    attempt("load-conn", lambda: session.load_conn(connection))
    connection["second"]["children"]["net"]["remote_ts"] = "10.9.0.0/16"
    attempt("load-conn with text for a list", lambda: session.load_conn(connection))
    attempt("load-conn with an unknown option", lambda: session.load_conn({"x": {"nonsense": "1"}}))
    attempt("load-conn with a wrong value", lambda: session.load_conn({"x": {"mobike": "perhaps"}}))
    print("conns:", sorted(text(session.get_conns()["conns"])))
    attempt("unload-conn", lambda: session.unload_conn({"name": "second"}))
    attempt("unload-conn again", lambda: session.unload_conn({"name": "second"}))
    attempt("load-shared", lambda: session.load_shared({"id": "k", "type": "ike", "data": "x", "owners": ["a", "b"]}))
    attempt("load-shared of no type", lambda: session.load_shared({"data": "x"}))
    print("shared:", sorted(text(session.get_shared()["keys"])))
    attempt("unload-shared", lambda: session.unload_shared({"id": "k"}))
    attempt("clear-creds", session.clear_creds)
    show("shared", session.get_shared())

    stopping.set()
    thread.join(5)
    print("events:", " ".join(seen))


def socket_to(path):
    import socket

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


main()

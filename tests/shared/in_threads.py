"""Work in several threads at once."""

import threading


def in_threads(count, work):
    """Calls work(number) in `count` threads, waits for all and raises the first exception."""
    failures = []

    def run(number):
        try:
            work(number)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]

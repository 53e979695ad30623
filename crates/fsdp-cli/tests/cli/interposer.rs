//! A library preloaded before the C library, to simulate: a file system without locks, a process that is killed at a
//! chosen directory change, a process that stops at its start, a full disk, and a process that is killed when it
//! renames a file whose content is not durable.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;

const SOURCE: &str = r#"
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <set>
#include <sys/stat.h>
#include <unistd.h>

static std::mutex lock;
static std::set<ino_t> synced;

__attribute__((constructor)) static void stop() {
    const char *stopped = getenv("STOPPED"), *process = getenv("FSDP_PROCESS");
    if (stopped && process && !strcmp(stopped, process)) raise(SIGSTOP);
}
static void count() {
    static int seen = 0;
    const char *at = getenv("KILL_AT");
    if (at && __sync_fetch_and_add(&seen, 1) == atoi(at)) raise(SIGKILL);
}

extern "C" int flock(int file, int operation) {
    if (getenv("NO_LOCKS")) { errno = ENOLCK; return -1; }
    return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(file, operation);
}
extern "C" ssize_t pwrite64(int file, const void *bytes, size_t count, long offset) {
    const char *full = getenv("FULL");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t len = full ? readlink(link, path, sizeof path - 1) : -1;
    path[len < 0 ? 0 : len] = 0;
    if (full && strstr(path, full)) { errno = ENOSPC; return -1; }
    return ((ssize_t (*)(int, const void *, size_t, long))dlsym(RTLD_NEXT, "pwrite64"))(file, bytes, count, offset);
}
extern "C" int fsync(int file) {
    struct stat found;
    if (fstat(file, &found) == 0) {
        std::lock_guard<std::mutex> guard(lock);
        synced.insert(found.st_ino);
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}
extern "C" int rename(const char *from, const char *to) {
    count();
    struct stat found;
    if (getenv("SYNC_FIRST") && stat(from, &found) == 0 && S_ISREG(found.st_mode)) {
        std::lock_guard<std::mutex> guard(lock);
        if (!synced.count(found.st_ino)) raise(SIGKILL);
    }
    return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename"))(from, to);
}
extern "C" int unlink(const char *path) {
    count();
    return ((int (*)(const char *))dlsym(RTLD_NEXT, "unlink"))(path);
}
extern "C" int rmdir(const char *path) {
    count();
    return ((int (*)(const char *))dlsym(RTLD_NEXT, "rmdir"))(path);
}
extern "C" int mkdir(const char *path, unsigned mode) {
    count();
    return ((int (*)(const char *, unsigned))dlsym(RTLD_NEXT, "mkdir"))(path, mode);
}
"#;

/// Builds the library for `LD_PRELOAD`. Environment variables enable its effects: with `NO_LOCKS`, no file can be
/// locked; with `KILL_AT=n`, the process kills itself before its n-th directory change (rename, unlink, rmdir or
/// mkdir), counted from 0; with `SYNC_FIRST`, before it renames a file that it has not synced; with `FULL=text`, writes
/// fail with `ENOSPC` in files whose paths contain the text; with `STOPPED=n`, process n of a launch is stopped at its
/// start.
pub(crate) fn library() -> PathBuf {
    static BUILT: OnceLock<TempDir> = OnceLock::new();
    let dir = BUILT.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("interposer.cpp"), SOURCE).unwrap();
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
        let mut command = Command::new(&compiler);
        command.current_dir(dir.path()).args(["-shared", "-fPIC", "-o", "interposer.so", "interposer.cpp", "-ldl"]);
        let output = command.output();
        let output = output.unwrap_or_else(|error| {
            panic!("these tests need a C++ compiler, and `{compiler}` does not start: {error}; install g++, or set CXX")
        });
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        dir
    });
    dir.path().join("interposer.so")
}

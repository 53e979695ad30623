//! Network file system clients with stale caches, simulated by two bindfs mounts of one directory that cache
//! attributes and names for ten minutes. Skipped where bindfs cannot mount.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use fsdp_ckpt::native::{RankSave, RunDir};

use super::native::{check, plan, run_state, write_part};

/// A mount of a directory with a cache of its own.
struct Client {
    path: PathBuf,
    process: Child,
}

impl Client {
    /// Mounts `real` at `path`; `None` if this machine cannot.
    fn mount(real: &Path, path: PathBuf) -> Option<Client> {
        fs::create_dir(&path).unwrap();
        let before = fs::metadata(&path).unwrap().dev();
        let caches = "attr_timeout=600,entry_timeout=600,negative_timeout=600";
        let mut process = Command::new("bindfs")
            .args(["-f", "-o", caches])
            .args([real, &path])
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let begin = Instant::now();
        while fs::metadata(&path).is_ok_and(|found| found.dev() == before) {
            if process.try_wait().unwrap().is_some() || begin.elapsed() > Duration::from_secs(300) {
                let _ = process.kill();
                let _ = process.wait();
                return None;
            }
            thread::yield_now();
        }
        Some(Client { path, process })
    }

    fn sees(&self, name: &str) -> bool {
        self.path.join(name).exists()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("-l").arg(&self.path).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            let _ = self.process.kill();
        }
        let _ = self.process.wait();
    }
}

#[test]
fn save_from_clients_with_stale_caches_commits() {
    let dir = tempfile::tempdir().unwrap();
    let real = dir.path().join("real");
    fs::create_dir_all(real.join("run/checkpoints")).unwrap();
    let mount = |name: &str| Client::mount(&real, dir.path().join(name));
    let (Some(first), Some(second)) = (mount("first"), mount("second")) else {
        println!("skipped: bindfs cannot mount here");
        return;
    };
    let plan = plan(2);
    let lock = RunDir::new(first.path.join("run")).lock().unwrap();
    let other = RunDir::new(second.path.join("run"));
    for step in 1..=3 {
        let complete = format!("run/checkpoints/{}", RunDir::name_of(step));
        let unfinished = format!("{complete}.{}.tmp", lock.attempt());
        // From here on, both clients cache that neither name exists.
        for client in [&first, &second] {
            assert!(!client.sees(&unfinished) && !client.sees(&complete));
        }
        let mut parts = Vec::new();
        for (run, rank) in [(&other, 1), (lock.run(), 0)] {
            if rank == 0 {
                assert!(!first.sees(&unfinished), "without stale caches this test shows nothing");
            }
            let mut part = RankSave::create(run, lock.attempt(), &plan, step, rank).unwrap();
            write_part(&mut part, &plan, rank, step as u8);
            parts.insert(0, part.finish().unwrap());
        }
        let path = lock.commit(&plan, step, run_state(step), parts).unwrap();
        check(&path, &plan, step, step as u8, 2);
        assert!(!second.sees(&complete), "without stale caches this test shows nothing");
    }
    assert_eq!(RunDir::new(real.join("run")).steps().unwrap(), [1, 2, 3]);
}

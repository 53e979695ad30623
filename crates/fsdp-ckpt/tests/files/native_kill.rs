//! `kill -9` of a saving process: every save that it reported exists, and no incomplete checkpoint looks complete.

use std::{
    io::{BufRead, BufReader},
    iter,
    num::NonZeroUsize,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use fsdp_ckpt::native::RunDir;

use super::native::{check, plan, save};

/// Environment variables of a child: the directory it saves to, and its number of ranks.
const CHILD_DIR: &str = "FSDP_CKPT_KILLED_CHILD_DIR";
const CHILD_WORLD: &str = "FSDP_CKPT_KILLED_CHILD_WORLD";

const KILLS: u64 = 100;

/// A child is killed during a save, after fewer than this many complete saves.
const SAVES_PER_LIFE: u64 = 3;

/// Does nothing, except as a child of the test below: then it saves until it is killed.
#[test]
fn child_saves_until_killed() {
    let (Ok(dir), Ok(world)) = (std::env::var(CHILD_DIR), std::env::var(CHILD_WORLD)) else { return };
    let (run, plan) = (RunDir::new(dir), plan(world.parse().unwrap()));
    let lock = run.lock().unwrap();
    println!("begin");
    lock.remove_leftovers().unwrap();
    let first = run.newest().unwrap().map_or(1, |(step, _)| step + 1);
    for step in first.. {
        save(&lock, &plan, step, step as u8);
        println!("saved {step}");
        lock.keep_last(NonZeroUsize::new(2).unwrap(), u64::MAX, &[]).unwrap();
    }
}

/// Lets a child save `saves` times, waits for `moment` and kills it. Returns the last step that it reported as
/// saved.
///
/// Saves are counted rather than timed, since the time of one varies tenfold with other load.
fn run_child(dir: &Path, world: usize, saves: u64, moment: Duration) -> Option<u64> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "native_kill::child_saves_until_killed", "--nocapture"])
        .env(CHILD_DIR, dir)
        .env(CHILD_WORLD, world.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || lines.next().map(Result::unwrap);
    while !next().expect("the child ended before it began").contains("begin") {}
    let mut said = None;
    for _ in 0..saves {
        said = saved_step(&next().expect("the child ended before it was killed"));
        assert!(said.is_some(), "the child says nothing else");
    }
    thread::sleep(moment);
    child.kill().unwrap();
    child.wait().unwrap();
    iter::from_fn(next).filter_map(|line| saved_step(&line)).max().or(said)
}

fn saved_step(line: &str) -> Option<u64> {
    line.strip_prefix("saved ")?.parse().ok()
}

#[test]
fn saved_checkpoints_survive_random_kills() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let begin = Instant::now();
    save(&run.lock().unwrap(), &plan(4), 1, 1);
    let save_micros = begin.elapsed().as_micros() as u64;
    let (mut chance, mut saved, mut expected) = (0x2545_f491_4f6c_dd1d_u64, 1, 1);
    for kill in 0..KILLS {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (saves, moment) = (chance % SAVES_PER_LIFE, Duration::from_micros((chance >> 33) % save_micros));
        let world = if kill % 2 == 0 { 4 } else { 1 };
        let said = run_child(dir.path(), world, saves, moment);
        saved = said.unwrap_or(saved).max(saved);
        expected += saves;
        let (newest, path) = run.newest().unwrap().unwrap();
        assert!(
            newest >= saved,
            "kill {kill} {moment:?} after {saves} saves: step {saved} was saved, {newest} is the newest"
        );
        // The checkpoint records which of the two world sizes saved it.
        let reader = fsdp_ckpt::native::NativeReader::open(&path).unwrap();
        check(&path, &plan(reader.manifest().world_size), newest, newest as u8, 3);
        saved = newest;
    }
    assert!(saved >= expected, "{saved} steps are saved, the children said {expected}");
}

//! `kill -9` of a process that saves: what it said it had saved is there, and nothing looks whole that is not.

use std::{
    io::{BufRead, BufReader, Read},
    num::NonZeroUsize,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use fsdp_ckpt::native::RunDir;

use super::native::{check, plan, save};

/// In the environment of a child: where it saves, and by how many ranks.
const CHILD_DIR: &str = "FSDP_CKPT_KILLED_CHILD_DIR";
const CHILD_WORLD: &str = "FSDP_CKPT_KILLED_CHILD_WORLD";

const KILLS: u64 = 100;

/// The longest life of a child after its first word, in saves of one that is not killed.
const LIFE_SAVES_MAX: u128 = 3;

/// Does nothing, unless it runs as a child of the test below: then it saves until it is killed.
#[test]
fn a_process_to_be_killed() {
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

/// Lets a child save for a while and kills it. Returns the last step that it said it had saved.
fn run_child(dir: &Path, world: usize, life: Duration) -> Option<u64> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "native_kill::a_process_to_be_killed", "--nocapture"])
        .env(CHILD_DIR, dir)
        .env(CHILD_WORLD, world.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("begin") {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0, "the child ended before it began");
    }
    thread::sleep(life);
    child.kill().unwrap();
    child.wait().unwrap();
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    rest.lines().filter_map(|line| line.strip_prefix("saved ")?.parse().ok()).max()
}

#[test]
fn a_hundred_kills_at_random_moments_lose_nothing_that_was_saved() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunDir::new(dir.path());
    let begin = Instant::now();
    save(&run.lock().unwrap(), &plan(4), 1, 1);
    let life_max = begin.elapsed().as_micros() * LIFE_SAVES_MAX;
    let (mut chance, mut saved) = (0x2545_f491_4f6c_dd1d_u64, 1);
    for kill in 0..KILLS {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let life = Duration::from_micros((u128::from(chance >> 33) % life_max) as u64);
        let world = if kill % 2 == 0 { 4 } else { 1 };
        let said = run_child(dir.path(), world, life);
        saved = said.unwrap_or(saved).max(saved);
        let (newest, path) = run.newest().unwrap().unwrap();
        assert!(
            newest >= saved,
            "kill {kill} after {life:?}: step {saved} was saved, {newest} is the newest"
        );
        // Which of the two worlds saved it is in the checkpoint.
        let reader = fsdp_ckpt::native::NativeReader::open(&path).unwrap();
        check(&path, &plan(reader.manifest().world_size), newest, newest as u8, 3);
        saved = newest;
    }
    assert!(saved > 20, "the children did save: {saved} steps");
}

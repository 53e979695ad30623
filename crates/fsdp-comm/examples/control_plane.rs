//! How long worlds of many processes take to join, and what their heartbeats cost the leader:
//! `cargo run --release -p fsdp-comm --example control_plane`. Processes are threads here, with the control plane of
//! processes; times are those of a machine that runs all of them.

use std::error::Error;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use fsdp_comm::auth::Token;
use fsdp_comm::process::{Control, ControlOptions, Facts, JoinError};

/// The thread of the leader's control plane.
const LEADER: &str = "fsdp-control-0";

fn options(process: usize, processes: usize) -> ControlOptions {
    let facts = Facts {
        host: "localhost".to_owned(),
        pid: std::process::id(),
        addresses: Vec::new(),
        cpu_model: String::new(),
        device: "cpu".to_owned(),
    };
    ControlOptions {
        process,
        processes,
        local_ranks: 1,
        facts,
        token: Token::open(),
        heartbeat: Duration::from_secs(1),
        dead_after: Duration::from_secs(15),
        join_timeout: Duration::from_secs(60),
    }
}

/// A world in which all processes start at once.
fn join(processes: usize) -> Result<Vec<Arc<Control>>, Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let follow = move |process| Control::follow(&|| Ok(vec![address]), options(process, processes));
    let joined: Result<Vec<_>, JoinError> = thread::scope(|scope| {
        let leader = scope.spawn(move || Control::lead(listener, options(0, processes)));
        let others: Vec<_> = (1..processes).map(|process| scope.spawn(move || follow(process))).collect();
        let threads = [leader].into_iter().chain(others);
        threads.map(|thread| thread.join().expect("joining does not panic")).collect()
    });
    Ok(joined?)
}

/// Processor time of the leader's control plane so far.
fn leader_ran() -> Result<Duration, Box<dyn Error>> {
    for task in fs::read_dir("/proc/self/task")? {
        let folder = task?.path();
        if fs::read_to_string(folder.join("comm"))?.trim() == LEADER {
            let schedstat = fs::read_to_string(folder.join("schedstat"))?;
            return Ok(Duration::from_nanos(schedstat.split(' ').next().unwrap_or_default().parse()?));
        }
    }
    Err(format!("there is no thread {LEADER}").into())
}

fn main() -> Result<(), Box<dyn Error>> {
    let seconds: u32 = env::args().nth(1).map_or(Ok(10), |seconds| seconds.parse())?;
    println!("| processes | joined in | leader, part of one core |\n|---|---|---|");
    for processes in [8, 64, 512] {
        let begin = Instant::now();
        let world = join(processes)?;
        let joined = begin.elapsed();
        let (begin, ran) = (Instant::now(), leader_ran()?);
        thread::sleep(Duration::from_secs(1) * seconds);
        let part = (leader_ran()? - ran).as_secs_f64() / begin.elapsed().as_secs_f64();
        println!("| {processes} | {:.2} s | {:.2} % |", joined.as_secs_f64(), 100.0 * part);
        thread::scope(|scope| world.iter().for_each(|control| drop(scope.spawn(|| control.leave()))));
        if let Some(verdict) = world.iter().find_map(|control| control.verdict()) {
            return Err(verdict.to_string().into());
        }
    }
    Ok(())
}

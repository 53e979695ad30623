//! How fast two processes exchange messages over our links, beside a plain copy through a loopback socket of the same
//! sizes, in turns.
//!
//! ```sh
//! cargo run --release -p fsdp-comm --example tcp_bw
//! ```
//!
//! Bytes that one process has received, per second: one way, then both ways at once; and the time of the shortest message
//! there and back. With `FSDP_TCP_BW_DIRECT=1` each process reads messages in the other's memory. The program starts itself again as the other process.

use std::env;
use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_comm::auth::Token;
use fsdp_comm::{Alarm, Exchanged, Header, Incoming, Link, Outgoing, TcpAcceptor, TcpWorld};
use fsdp_core::Rank;
use fsdp_core::comm::CommError;

/// Tells the other process that it is one.
const OTHER: &str = "FSDP_TCP_BW_OTHER";

/// Lets each process read messages in the other's memory.
const DIRECT: &str = "FSDP_TCP_BW_DIRECT";

const SIZES: [usize; 4] = [64 << 10, 1 << 20, 8 << 20, 64 << 20];
/// Bytes per measurement.
const BYTES: usize = 512 << 20;
const SMALL_ROUNDS: usize = 2_000;
const HEADER: Header = [1; 31];

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

#[derive(Default)]
struct First(Mutex<Option<CommError>>);

impl Alarm for First {
    fn raise(&self, error: CommError) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    fn raised(&self) -> Option<CommError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Sends, receives, or both at once.
fn exchange(link: &mut dyn Link, out: Option<&[u8]>, into: Option<&mut [u8]>) -> Outcome {
    let peer = 1 - link.rank();
    let (parts, mut into) = (out.map(|out| [out]), into.map(|into| [into]));
    let outgoing = parts.as_ref().map(|parts| Outgoing { to: peer, header: &HEADER, parts });
    let incoming = into.as_mut().map(|parts| Incoming { from: peer, header: &HEADER, parts });
    match link.exchange(outgoing, incoming)? {
        Exchanged::Done => Ok(()),
        other => Err(format!("the exchange ended as {other:?}").into()),
    }
}

/// Seconds per round, after one that does not count.
fn timed(rounds: usize, mut round: impl FnMut() -> Outcome) -> Outcome<f64> {
    round()?;
    let start = Instant::now();
    (0..rounds).try_for_each(|_| round())?;
    Ok(start.elapsed().as_secs_f64() / rounds as f64)
}

/// The links of this process, and a plain socket beside them; `tell` and `hear` reach the other process.
fn connect(rank: usize, tell: &mut dyn Write, hear: &mut dyn BufRead) -> Outcome<(Box<dyn Link>, TcpStream)> {
    let (door, listener) =
        (TcpAcceptor::bind(Ipv4Addr::LOCALHOST.into())?, TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?);
    writeln!(tell, "{} {}", door.address()?, listener.local_addr()?)?;
    tell.flush()?;
    let mut line = String::new();
    hear.read_line(&mut line)?;
    let (other, plain) = line.trim().split_once(' ').ok_or("the other process has said nothing")?;
    let (own, other): (SocketAddr, SocketAddr) = (door.address()?, other.parse()?);
    let addresses = if rank == 0 { vec![vec![own], vec![other]] } else { vec![vec![other], vec![own]] };
    let alarm = Arc::new(First::default());
    let timeout = Duration::from_secs(60);
    let direct_from = env::var_os(DIRECT).is_some().then_some(32 << 10);
    let links =
        door.open(TcpWorld { addresses, generation: 1, alarm, timeout, direct_from }, Token::open())?;
    let stream = if rank == 0 { listener.accept()?.0 } else { TcpStream::connect(plain)? };
    stream.set_nodelay(true)?;
    Ok((links.link(0, Rank(rank)), stream))
}

fn measure(rank: usize, link: &mut dyn Link, stream: &TcpStream) -> Outcome {
    let is_sender = rank == 0;
    if !is_sender {
        println!("{:>10}  {:^27}  {:^27}", "GB/s", "one way", "both ways");
        println!(
            "{:>10}  {:>8} {:>8} {:>9}  {:>8} {:>8} {:>9}",
            "bytes", "link", "socket", "ratio", "link", "socket", "ratio"
        );
    }
    for size in SIZES {
        let (out, mut into) = (vec![1u8; size], vec![0u8; size]);
        let rounds = BYTES / size;
        let one_way = timed(rounds, || {
            if is_sender { exchange(link, Some(&out), None) } else { exchange(link, None, Some(&mut into)) }
        })?;
        let plain_one_way = timed(rounds, || {
            Ok(if is_sender { (&*stream).write_all(&out) } else { (&*stream).read_exact(&mut into) }?)
        })?;
        let both_ways = timed(rounds, || exchange(link, Some(&out), Some(&mut into)))?;
        let plain_both_ways = timed(rounds, || {
            thread::scope(|scope| {
                let sent = scope.spawn(|| (&*stream).write_all(&out));
                (&*stream).read_exact(&mut into)?;
                sent.join().map_err(|_| "the thread that sends has panicked")??;
                Ok(())
            })
        })?;
        if !is_sender {
            let speed = |seconds: f64| size as f64 / seconds / 1e9;
            println!(
                "{size:>10}  {:>8.2} {:>8.2} {:>9.2}  {:>8.2} {:>8.2} {:>9.2}",
                speed(one_way),
                speed(plain_one_way),
                plain_one_way / one_way,
                speed(both_ways),
                speed(plain_both_ways),
                plain_both_ways / both_ways
            );
        }
    }
    let mut small = [1; 8];
    let there_and_back = timed(SMALL_ROUNDS, || {
        if is_sender {
            exchange(link, Some(&[1; 8]), None)?;
            exchange(link, None, Some(&mut small))
        } else {
            exchange(link, None, Some(&mut small))?;
            exchange(link, Some(&[1; 8]), None)
        }
    })?;
    if !is_sender {
        println!("8 bytes there and back: {:.0} us", there_and_back * 1e6);
    }
    Ok(())
}

fn main() -> Outcome {
    if env::var_os(OTHER).is_some() {
        // What it prints is read by the one that has started it, which prints for both.
        let (mut link, stream) =
            connect(0, &mut std::io::stdout().lock(), &mut BufReader::new(std::io::stdin().lock()))?;
        return measure(0, &mut *link, &stream);
    }
    let mut other = Command::new(env::current_exe()?)
        .env(OTHER, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let (Some(mut tell), Some(hear)) = (other.stdin.take(), other.stdout.take()) else {
        return Err("the other process has no pipes".into());
    };
    let (mut link, stream) = connect(1, &mut tell, &mut BufReader::new(hear))?;
    measure(1, &mut *link, &stream)?;
    other.wait()?;
    Ok(())
}

//! Measures how fast two processes exchange 64 MiB over MPI, compared with a plain copy through a loopback socket.
//!
//! ```sh
//! mpirun -n 2 target/release/examples/mpi_bw
//! ```
//!
//! Prints the bytes that one process receives per second, one way and then both ways at once; the same over a socket
//! between the same two processes; and the round-trip time of an 8-byte message.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_comm::{Alarm, Exchanged, Header, Incoming, Link, Outgoing};
use fsdp_core::Rank;
use fsdp_core::comm::CommError;
use fsdp_mpi::{MpiLibrary, MpiWorld};

const BYTES: usize = 64 << 20;
const ROUNDS: usize = 20;
const SMALL_ROUNDS: usize = 2_000;
const HEADER: Header = [1; 31];

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

#[derive(Default)]
struct First(Mutex<Option<CommError>>);

impl Alarm for First {
    fn raise(&self, error: CommError) {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(error);
    }

    fn raised(&self) -> Option<CommError> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
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

/// Seconds per round, after one warm-up round.
fn timed(rounds: usize, mut round: impl FnMut() -> Outcome) -> Outcome<f64> {
    round()?;
    let start = Instant::now();
    (0..rounds).try_for_each(|_| round())?;
    Ok(start.elapsed().as_secs_f64() / rounds as f64)
}

/// Connects the two processes by a socket; they exchange the port over MPI.
fn connect(link: &mut dyn Link) -> Outcome<TcpStream> {
    let mut port = [0; 2];
    let stream = if link.rank() == 0 {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        exchange(link, Some(&listener.local_addr()?.port().to_le_bytes()), None)?;
        listener.accept()?.0
    } else {
        exchange(link, None, Some(&mut port))?;
        TcpStream::connect(("127.0.0.1", u16::from_le_bytes(port)))?
    };
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn main() -> Outcome {
    let library = MpiLibrary::find()?;
    let about = library.version().to_owned();
    let world = MpiWorld::open(library, Duration::from_secs(60), Arc::new(First::default()))?;
    if world.size() != 2 {
        return Err(format!("this takes two processes, not {}: mpirun -n 2 ..", world.size()).into());
    }
    let mut link = world.link(0, [Rank(0), Rank(1)].into());
    let link = &mut *link;
    let is_sender = link.rank() == 0;
    let (out, mut into) = (vec![1u8; BYTES], vec![0u8; BYTES]);
    let speed = |seconds: f64| BYTES as f64 / seconds / 1e9;

    let one_way = timed(ROUNDS, || {
        if is_sender { exchange(link, Some(&out), None) } else { exchange(link, None, Some(&mut into)) }
    })?;
    let both_ways = timed(ROUNDS, || exchange(link, Some(&out), Some(&mut into)))?;
    let there_and_back = timed(SMALL_ROUNDS, || {
        if is_sender {
            exchange(link, Some(&[1; 8]), None)?;
            exchange(link, None, Some(&mut into[..8]))
        } else {
            exchange(link, None, Some(&mut into[..8]))?;
            exchange(link, Some(&[1; 8]), None)
        }
    })?;
    let stream = connect(link)?;
    let socket_one_way = timed(ROUNDS, || {
        let done = if is_sender { (&stream).write_all(&out) } else { (&stream).read_exact(&mut into) };
        Ok(done?)
    })?;
    let socket_both_ways = timed(ROUNDS, || {
        thread::scope(|scope| {
            let sent = scope.spawn(|| (&stream).write_all(&out));
            (&stream).read_exact(&mut into)?;
            sent.join().map_err(|_| "the thread that sends has panicked")??;
            Ok(())
        })
    })?;
    if !is_sender {
        println!("{about}");
        println!("one way    MPI {:.2} GB/s   socket {:.2} GB/s", speed(one_way), speed(socket_one_way));
        println!("both ways  MPI {:.2} GB/s   socket {:.2} GB/s", speed(both_ways), speed(socket_both_ways));
        println!("8 bytes there and back  MPI {:.0} us", there_and_back * 1e6);
    }
    Ok(world.finalize()?)
}

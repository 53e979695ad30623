//! Tests of links over loopback, and of failures of a connection.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

const LONG: Duration = Duration::from_secs(600);

#[derive(Default)]
struct Bell(Mutex<Option<CommError>>);

impl Alarm for Bell {
    fn raise(&self, error: CommError) {
        self.0.lock().unwrap().get_or_insert(error);
    }

    fn raised(&self) -> Option<CommError> {
        self.0.lock().unwrap().clone()
    }
}

/// The links of a world of processes that hold one rank each.
fn world(ranks: usize, timeout: Duration, direct_from: Option<u64>) -> Vec<TcpLinks> {
    let alarm = Arc::new(Bell::default());
    let doors: Vec<_> = (0..ranks).map(|_| TcpAcceptor::bind(Ipv4Addr::LOCALHOST.into()).unwrap()).collect();
    let addresses: Vec<_> = doors.iter().map(|door| vec![door.address().unwrap()]).collect();
    let open = |door: TcpAcceptor| {
        let world = TcpWorld {
            addresses: addresses.clone(),
            generation: 7,
            alarm: alarm.clone(),
            timeout,
            direct_from,
        };
        door.open(world, crate::auth::Token::open()).unwrap()
    };
    doors.into_iter().map(open).collect()
}

fn pair(timeout: Duration, direct_from: Option<u64>) -> [Box<dyn Link>; 2] {
    let links = world(2, timeout, direct_from);
    [links[0].link(0, Rank(0)), links[1].link(0, Rank(1))]
}

/// Sends `give` to the other of two ranks, and receives slices of these lengths.
fn swap(link: &mut dyn Link, header: u8, give: &[Vec<u8>], lens: &[usize]) -> (Exchanged, Vec<Vec<u8>>) {
    let peer = 1 - link.rank();
    let mut take: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0; len]).collect();
    let give: Vec<&[u8]> = give.iter().map(Vec::as_slice).collect();
    let mut into: Vec<&mut [u8]> = take.iter_mut().map(Vec::as_mut_slice).collect();
    let header = [header; 31];
    let outgoing = Outgoing { to: peer, header: &header, parts: &give };
    let incoming = Incoming { from: peer, header: &header, parts: &mut into };
    let exchanged = link.exchange(Some(outgoing), Some(incoming)).unwrap();
    (exchanged, take)
}

#[test]
fn messages_exceeding_buffers_cross_in_both_directions() {
    for direct_from in [None, Some(1)] {
        let [mut left, mut right] = pair(LONG, direct_from);
        let data = |rank: u8| {
            vec![(0..40_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 ^ rank).collect()]
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| swap(&mut *right, 1, &data(1), &[40_000_000]));
            assert_eq!(swap(&mut *left, 1, &data(0), &[40_000_000]), (Exchanged::Done, data(1)));
            assert_eq!(other.join().unwrap(), (Exchanged::Done, data(0)));
        });
    }
}

#[test]
fn mismatched_header_or_length_is_reported_without_reading() {
    for (header, len, direct_from) in [(2u8, 3usize, None), (1, 4, None), (2, 3, Some(1))] {
        let [mut left, mut right] = pair(LONG, direct_from);
        thread::scope(|scope| {
            let other = scope.spawn(|| swap(&mut *right, header, &[vec![9; len]], &[3]).0);
            let (exchanged, taken) = swap(&mut *left, 1, &[vec![9; 3]], &[3]);
            let expected = Exchanged::Differs { header: [header; 31], len_bytes: len as u64 };
            assert_eq!((exchanged, taken), (expected, vec![vec![0; 3]]));
            let other = other.join().unwrap();
            assert_eq!(
                other != Exchanged::Done,
                header != 1,
                "the other one only sent a wrong length: {other:?}"
            );
        });
    }
}

#[test]
fn missing_peer_is_late_and_closed_peer_is_named() {
    let [mut left, right] = pair(Duration::from_millis(100), None);
    let receive = |link: &mut dyn Link| {
        link.exchange(None, Some(Incoming { from: 1, header: &[0; 31], parts: &mut [&mut [0; 4]] }))
    };
    assert_eq!(receive(&mut *left).unwrap(), Exchanged::Late { peer: 1 });
    let [mut left, mut right_again] = pair(LONG, None);
    thread::scope(|scope| {
        scope.spawn(move || {
            right_again
                .exchange(Some(Outgoing { to: 0, header: &[0; 31], parts: &[&[1, 2, 3, 4]] }), None)
                .unwrap();
        });
    });
    assert_eq!(receive(&mut *left).unwrap(), Exchanged::Done);
    let error = receive(&mut *left).unwrap_err();
    assert!(matches!(error, CommError::PeerFailed { rank: Rank(1), .. }), "{error}");
    drop(right);
}

#[test]
fn first_failure_is_reported() {
    let links = world(2, LONG, None);
    let (mut left, right) = (links[0].link(0, Rank(0)), links[1].link(0, Rank(1)));
    let first = CommError::PeerFailed { rank: Rank(5), reason: "it was killed".to_owned() };
    left.alarm().raise(first.clone());
    let waits = left.exchange(None, Some(Incoming { from: 1, header: &[0; 31], parts: &mut [] }));
    assert_eq!(waits.unwrap_err(), first);
    drop(right);
}

#[test]
fn unauthenticated_connections_do_not_disturb_links() {
    let links = world(2, LONG, None);
    let address = links[0].shared.world.addresses[0][0];
    let stranger = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    };
    let _open: Vec<_> = (0..20).map(|i| stranger(&vec![i; 10 * usize::from(i)])).collect();
    let (mut left, mut right) = (links[0].link(0, Rank(0)), links[1].link(0, Rank(1)));
    thread::scope(|scope| {
        let other = scope.spawn(move || swap(&mut *right, 1, &[vec![1]], &[1]).0);
        assert_eq!(swap(&mut *left, 1, &[vec![2]], &[1]), (Exchanged::Done, vec![vec![1]]));
        assert_eq!(other.join().unwrap(), Exchanged::Done);
    });
}

#[test]
fn direct_reads_require_both_ends_and_matching_memory() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let connect = || {
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    };
    for (near_allows, far_allows) in [(true, true), (true, false), (false, true), (false, false)] {
        let (near, far) = connect();
        thread::scope(|scope| {
            let other = scope.spawn(move || direct::negotiate(&far, far_allows).unwrap().is_some());
            let is_direct = cfg!(target_os = "linux") && near_allows && far_allows;
            assert_eq!(direct::negotiate(&near, near_allows).unwrap().is_some(), is_direct);
            assert_eq!(other.join().unwrap(), is_direct);
        });
    }
    // A peer that names a wrong location (as on another machine), no process, or no location.
    let elsewhere = [0u8; 16];
    let address = elsewhere.as_ptr().expose_provenance() as u64;
    for location in [
        [u64::from(std::process::id()), address, 16],
        [0, address, 16],
        [u64::from(std::process::id()), 8, 16],
    ] {
        let (near, mut far) = connect();
        far.write_all(&bytemuck::cast::<_, [u8; 24]>(location)).unwrap();
        far.write_all(&[7; 16]).unwrap();
        far.write_all(&[1]).unwrap();
        assert!(direct::negotiate(&near, true).unwrap().is_none(), "{location:?}");
    }
}

#[test]
fn direct_send_returns_only_after_peer_has_read() {
    let [mut left, mut right] = pair(LONG, Some(1));
    let (header, is_read) = ([3; 31], AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            is_read.store(true, Ordering::SeqCst);
            let mut into = [0; 5];
            let incoming = Incoming { from: 0, header: &header, parts: &mut [&mut into] };
            assert_eq!(right.exchange(None, Some(incoming)).unwrap(), Exchanged::Done);
            assert_eq!(into, [1, 2, 3, 4, 5]);
        });
        let outgoing = Outgoing { to: 1, header: &header, parts: &[&[1, 2], &[], &[3, 4, 5]] };
        assert_eq!(left.exchange(Some(outgoing), None).unwrap(), Exchanged::Done);
        assert!(is_read.load(Ordering::SeqCst));
    });
}

#[test]
fn places_with_wrong_total_length_are_rejected() {
    let parts: [&[u8]; 2] = [&[1, 2], &[3]];
    let encoded = direct::places(&parts);
    for (len_bytes, is_right) in [(3, true), (2, false), (4, false)] {
        let mut places = direct::Places::new();
        let mut rest = &encoded[..];
        while !places.missing().is_empty() {
            let missing = places.missing().len();
            places.missing().copy_from_slice(rest.split_off(..missing).unwrap());
            places.advance(missing, len_bytes).unwrap();
        }
        assert_eq!(places.all(len_bytes).is_ok(), is_right, "{len_bytes}");
    }
}

#[test]
fn direct_reads_support_thousands_of_parts() {
    let [mut left, mut right] = pair(LONG, Some(1));
    let part = |i: usize| vec![(i % 251) as u8; i % 7];
    let (give, lens): (Vec<_>, Vec<_>) = (0..5000).map(|i| (part(i), (i + 3) % 7)).unzip();
    let total: usize = give.iter().map(Vec::len).sum();
    let mut left_over = total;
    let mut lens: Vec<usize> = lens
        .into_iter()
        .map(|len: usize| {
            let len = len.min(left_over);
            left_over -= len;
            len
        })
        .collect();
    lens.push(left_over);
    thread::scope(|scope| {
        let other = scope.spawn(|| swap(&mut *right, 1, &give, &lens));
        assert_eq!(swap(&mut *left, 1, &give, &lens).1.concat(), give.concat());
        assert_eq!(other.join().unwrap().1.concat(), give.concat());
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Messages may be split differently on the two sides; the bytes are the same.
    #[test]
    fn messages_arrive_intact_for_any_part_lengths(
        out in prop::collection::vec(0usize..70_000, 0..6),
        cuts in prop::collection::vec(0usize..70_000, 0..6),
        direct_from in prop::option::of(1u64..100_000),
    ) {
        let total: usize = out.iter().sum();
        let mut lens = Vec::new();
        let mut rest = total;
        for cut in cuts {
            lens.push(cut.min(rest));
            rest -= cut.min(rest);
        }
        lens.push(rest);
        let bytes: Vec<u8> = (0..total).map(|i| (i * 31 % 251) as u8).collect();
        let mut start = 0;
        let cut = |len: &usize| { start += len; bytes[start - len..start].to_vec() };
        let parts: Vec<Vec<u8>> = out.iter().map(cut).collect();
        let [mut left, mut right] = pair(LONG, direct_from);
        thread::scope(|scope| {
            scope.spawn(|| swap(&mut *right, 1, &parts, &[]));
            let peer = 1;
            let mut take: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0; len]).collect();
            let mut into: Vec<&mut [u8]> = take.iter_mut().map(Vec::as_mut_slice).collect();
            let header = [1; 31];
            left.exchange(Some(Outgoing { to: peer, header: &header, parts: &[] }), None).unwrap();
            let incoming = Incoming { from: peer, header: &header, parts: &mut into };
            assert_eq!(left.exchange(None, Some(incoming)).unwrap(), Exchanged::Done);
            assert_eq!(take.concat(), bytes);
        });
    }
}

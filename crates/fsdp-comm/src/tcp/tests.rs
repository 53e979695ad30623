//! Links over loopback: what can go wrong on a connection.

use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::thread;

use proptest::prelude::*;

use super::*;

const LONG: Duration = Duration::from_secs(60);

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

/// The links of a world of processes with one rank each.
fn world(ranks: usize, timeout: Duration) -> Vec<TcpLinks> {
    let alarm = Arc::new(Bell::default());
    let doors: Vec<_> = (0..ranks).map(|_| TcpDoor::bind(Ipv4Addr::LOCALHOST.into()).unwrap()).collect();
    let addresses: Vec<_> = doors.iter().map(|door| vec![door.address().unwrap()]).collect();
    let open = |door: TcpDoor| {
        let world = TcpWorld { addresses: addresses.clone(), generation: 7, alarm: alarm.clone(), timeout };
        door.open(world, crate::process::auth::Token::open()).unwrap()
    };
    doors.into_iter().map(open).collect()
}

fn pair(timeout: Duration) -> [Box<dyn Link>; 2] {
    let links = world(2, timeout);
    [links[0].link(0, Rank(0)), links[1].link(0, Rank(1))]
}

/// Sends `give` to the other of two ranks and receives slices of these lengths.
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
fn messages_larger_than_any_buffer_cross_in_both_directions_at_once() {
    let [mut left, mut right] = pair(LONG);
    let data = |rank: u8| {
        vec![(0..40_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 ^ rank).collect()]
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| swap(&mut *right, 1, &data(1), &[40_000_000]));
        assert_eq!(swap(&mut *left, 1, &data(0), &[40_000_000]), (Exchanged::Done, data(1)));
        assert_eq!(other.join().unwrap(), (Exchanged::Done, data(0)));
    });
}

#[test]
fn another_header_or_length_is_told_and_nothing_is_read() {
    for (header, len) in [(2u8, 3usize), (1, 4)] {
        let [mut left, mut right] = pair(LONG);
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
fn who_does_not_come_is_late_and_who_has_gone_is_named() {
    let [mut left, right] = pair(Duration::from_millis(100));
    let receive = |link: &mut dyn Link| {
        link.exchange(None, Some(Incoming { from: 1, header: &[0; 31], parts: &mut [&mut [0; 4]] }))
    };
    assert_eq!(receive(&mut *left).unwrap(), Exchanged::Late { peer: 1 });
    let [mut left, mut right_again] = pair(LONG);
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
fn the_failure_that_was_first_is_the_one_that_is_told() {
    let links = world(2, LONG);
    let (mut left, right) = (links[0].link(0, Rank(0)), links[1].link(0, Rank(1)));
    let first = CommError::PeerFailed { rank: Rank(5), reason: "it was killed".to_owned() };
    left.alarm().raise(first.clone());
    let waits = left.exchange(None, Some(Incoming { from: 1, header: &[0; 31], parts: &mut [] }));
    assert_eq!(waits.unwrap_err(), first);
    drop(right);
}

#[test]
fn strangers_are_not_answered_and_disturb_nobody() {
    let links = world(2, LONG);
    let address = links[0].shared.world.addresses[0][0];
    let stranger = |bytes: &[u8]| {
        use std::io::Write;
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// However messages are cut on the two sides, their bytes are the same.
    #[test]
    fn parts_of_any_lengths_arrive_whole(
        out in prop::collection::vec(0usize..70_000, 0..6),
        cuts in prop::collection::vec(0usize..70_000, 0..6),
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
        let [mut left, mut right] = pair(LONG);
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

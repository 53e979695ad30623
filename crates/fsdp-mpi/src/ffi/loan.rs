//! Slices of a caller, lent to another thread until all pieces have been returned.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// The number of pieces that are lent out.
#[derive(Default)]
struct Outstanding {
    pieces: Mutex<usize>,
    returned: Condvar,
}

/// Part of a lent slice. Dropping it returns it.
pub(crate) struct Piece {
    start: *mut u8,
    len: usize,
    may_write: bool,
    outstanding: Arc<Outstanding>,
}

// SAFETY: while a piece lives, no other code uses its part of the slice (or, if the piece is read-only, writes it), and
// any thread may read and write bytes.
unsafe impl Send for Piece {}

impl Piece {
    fn new(start: *mut u8, len: usize, may_write: bool, outstanding: &Arc<Outstanding>) -> Self {
        *outstanding.pieces.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self { start, len, may_write, outstanding: outstanding.clone() }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Pointer to the bytes, valid for reads until the piece is dropped.
    pub(super) fn start(&self) -> *const u8 {
        self.start
    }

    /// Pointer to the bytes, valid for writes until the piece is dropped.
    ///
    /// # Panics
    /// If the slice was lent for reading only.
    pub(super) fn start_mut(&self) -> *mut u8 {
        assert!(self.may_write, "what was lent for reading is not written");
        self.start
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        *self.outstanding.pieces.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.outstanding.returned.notify_all();
    }
}

/// Waits for all pieces on drop, so also when the borrower panics.
struct Lender(Arc<Outstanding>);

impl Drop for Lender {
    fn drop(&mut self) {
        let pieces = self.0.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.returned.wait_while(pieces, |pieces| *pieces > 0));
    }
}

/// Cuts the concatenated slices into messages of `message_max` bytes; the last one may be shorter.
fn cut(
    slices: impl Iterator<Item = (*mut u8, usize)>,
    message_max: usize,
    may_write: bool,
    outstanding: &Arc<Outstanding>,
) -> Vec<Vec<Piece>> {
    let (mut messages, mut room) = (Vec::<Vec<Piece>>::new(), 0);
    for (start, len) in slices {
        let mut taken = 0;
        while taken < len {
            if room == 0 {
                messages.push(Vec::new());
                room = message_max;
            }
            let piece_len = room.min(len - taken);
            let piece = Piece::new(start.wrapping_add(taken), piece_len, may_write, outstanding);
            messages.last_mut().expect("one was just begun").push(piece);
            (taken, room) = (taken + piece_len, room - piece_len);
        }
    }
    messages
}

/// Lends the slices of `read` for reading and those of `written` for writing, and returns the result of `borrow` once
/// every piece has been dropped, on whichever thread. A piece that is never dropped blocks this function forever; that
/// is what makes it sound.
///
/// The pieces are grouped into messages of `message_max` bytes, so that message lengths do not depend on how either
/// side splits its data into slices.
pub(crate) fn lend<R>(
    read: &[&[u8]],
    written: &mut [&mut [u8]],
    message_max: usize,
    borrow: impl FnOnce(Vec<Vec<Piece>>, Vec<Vec<Piece>>) -> R,
) -> R {
    let lender = Lender(Arc::default());
    let read = read.iter().map(|slice| (slice.as_ptr().cast_mut(), slice.len()));
    let read = cut(read, message_max, false, &lender.0);
    let written = written.iter_mut().map(|slice| (slice.as_mut_ptr(), slice.len()));
    let written = cut(written, message_max, true, &lender.0);
    borrow(read, written)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn message_lengths_are_independent_of_slice_boundaries() {
        fn lens(messages: &[Vec<Piece>]) -> Vec<Vec<usize>> {
            messages.iter().map(|pieces| pieces.iter().map(Piece::len).collect()).collect()
        }
        let mut target = [0; 9];
        let (first, second) = target.split_at_mut(1);
        lend(&[&[1, 2, 3], &[], &[4, 5, 6, 7, 8, 9]], &mut [first, second], 4, |read, written| {
            assert_eq!(lens(&read), [vec![3, 1], vec![4], vec![1]]);
            assert_eq!(lens(&written), [vec![1, 3], vec![4], vec![1]]);
        });
    }

    #[test]
    fn lend_waits_for_pieces_held_by_other_threads() {
        let returned = AtomicBool::new(false);
        thread::scope(|scope| {
            let (sender, pieces) = std::sync::mpsc::channel();
            let returned = &returned;
            scope.spawn(move || {
                lend(&[&[1, 2]], &mut [], 1, |read, _| sender.send(read).unwrap());
                returned.store(true, Ordering::SeqCst);
            });
            let mut pieces: Vec<Vec<Piece>> = pieces.recv().unwrap();
            pieces.pop();
            assert!(!returned.load(Ordering::SeqCst), "one piece is still out");
            drop(pieces);
        });
        assert!(returned.load(Ordering::SeqCst));
    }

    #[test]
    #[should_panic(expected = "lent for reading")]
    fn writing_to_read_only_piece_panics() {
        lend(&[&[1]], &mut [], 1, |read, _| read[0][0].start_mut());
    }
}

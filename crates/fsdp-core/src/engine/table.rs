//! The buffers of an engine, as its schedules declare them.

use crate::error::Error;
use crate::memory::{Buffer, Category, Memory, SliceMut};
use crate::rank::Queue;
use crate::schedule::{BufferDecl, BufferId, Place};
use crate::update::RankTables;

/// One buffer per declaration. An operation takes its buffers out of the table while it runs; so do collectives in
/// flight and open gradients.
pub(super) struct Table<B> {
    decls: Vec<BufferDecl>,
    buffers: Vec<Option<B>>,
}

impl<B: Buffer> Table<B> {
    /// Allocates the declared buffers. Those that have contents before the first step are zero.
    pub(super) fn allocate<M: Memory<Buffer = B>>(
        memory: &M,
        decls: &[BufferDecl],
        tables: &RankTables,
    ) -> Result<Self, Error> {
        let allocate = |decl: &BufferDecl| -> Result<_, Error> {
            let (category, dtype, len) = (decl.category, decl.dtype, decl.len_on(tables));
            let mut buffer = match decl.place {
                Place::Device => memory.allocate(category, dtype, len)?,
                Place::Host => memory.allocate_host(category, dtype, len)?,
            };
            if decl.role.is_kept() || category == Category::CommStaging {
                memory.zero(Queue::Compute, SliceMut::whole(&mut buffer))?;
            }
            Ok(Some(buffer))
        };
        let buffers = decls.iter().map(allocate).collect::<Result<_, _>>()?;
        Ok(Self { decls: decls.to_vec(), buffers })
    }

    /// Returns a buffer for reading.
    ///
    /// # Errors
    /// [`Error::BufferInUse`] when the buffer was taken out, which the checker rules out.
    pub(super) fn get(&self, id: BufferId) -> Result<&B, Error> {
        self.buffers[id.index()].as_ref().ok_or_else(|| in_use(&self.decls, id))
    }

    /// Returns a buffer for writing.
    ///
    /// # Errors
    /// As [`Table::get`].
    pub(super) fn get_mut(&mut self, id: BufferId) -> Result<&mut B, Error> {
        self.buffers[id.index()].as_mut().ok_or_else(|| in_use(&self.decls, id))
    }

    /// Returns two different buffers, one for reading and one for writing.
    ///
    /// # Errors
    /// As [`Table::get`].
    pub(super) fn pair(&mut self, read: BufferId, write: BufferId) -> Result<(&B, &mut B), Error> {
        match self.buffers.get_disjoint_mut([read.index(), write.index()]) {
            Ok([Some(from), Some(to)]) => Ok((from, to)),
            Ok([Some(_), None]) => Err(in_use(&self.decls, write)),
            Ok(_) | Err(_) => Err(in_use(&self.decls, read)),
        }
    }

    /// Takes a buffer out.
    ///
    /// # Errors
    /// As [`Table::get`].
    pub(super) fn take(&mut self, id: BufferId) -> Result<B, Error> {
        self.buffers[id.index()].take().ok_or_else(|| in_use(&self.decls, id))
    }

    /// Takes buffers out, in the given order.
    ///
    /// # Errors
    /// As [`Table::get`].
    pub(super) fn take_all(&mut self, ids: &[BufferId]) -> Result<Vec<B>, Error> {
        ids.iter().map(|&id| self.take(id)).collect()
    }

    /// Takes buffers out and appends them to `buffers`, which avoids an allocation.
    ///
    /// # Errors
    /// As [`Table::get`].
    pub(super) fn take_into(&mut self, ids: &[BufferId], buffers: &mut Vec<B>) -> Result<(), Error> {
        for &id in ids {
            buffers.push(self.take(id)?);
        }
        Ok(())
    }

    /// Puts back a buffer that was taken out.
    pub(super) fn put(&mut self, id: BufferId, buffer: B) {
        let decl = &self.decls[id.index()];
        debug_assert!(
            decl.dtype == buffer.dtype() && decl.len.is_none_or(|len| len == buffer.len()),
            "{decl:?}"
        );
        let before = self.buffers[id.index()].replace(buffer);
        debug_assert!(before.is_none(), "a buffer comes back to its place: {decl:?}");
    }

    /// Puts buffers back, in the given order.
    pub(super) fn put_all(&mut self, ids: &[BufferId], buffers: impl IntoIterator<Item = B>) {
        ids.iter().zip(buffers).for_each(|(&id, buffer)| self.put(id, buffer));
    }

    /// Gives up the contents of a buffer.
    ///
    /// # Errors
    /// As [`Table::get`].
    pub(super) fn release<M: Memory<Buffer = B>>(
        &mut self,
        memory: &M,
        queue: Queue,
        id: BufferId,
    ) -> Result<(), Error> {
        memory.release(queue, self.get_mut(id)?);
        Ok(())
    }

    /// Swaps two buffers.
    pub(super) fn swap(&mut self, a: BufferId, b: BufferId) {
        self.buffers.swap(a.index(), b.index());
    }
}

fn in_use(decls: &[BufferDecl], id: BufferId) -> Error {
    Error::BufferInUse { buffer: id.index(), name: decls[id.index()].name() }
}

//! Chunks of samples: graphs and plans are made for one chunk, and plans are repeated for all chunks of a rank.

use fsdp_core::memory::Category;

use super::list::{List, Step};
use super::plan::{BackwardPlan, BlockPlan};
use super::{Call, Decl, Operand};
use crate::op::{Exchange, ExpertAxis, Op, Pointwise, Rows};

impl BlockPlan {
    /// Repeats the calls of a plan for `here` chunks, which lie one after the other in each place.
    pub(crate) fn over_chunks(&self, here: usize) -> Self {
        let mut places = self.places.iter().map(|decl| Decl { rows: decl.rows * here, ..*decl }).collect();
        let mut over = |list: &List| list.over_chunks(here, &mut places);
        let forward = over(&self.forward);
        let backward =
            self.backward.as_ref().map(|plan| BackwardPlan { list: over(&plan.list), ..plan.clone() });
        Self { places, forward, backward, ..self.clone() }
    }
}

impl List {
    fn over_chunks(&self, here: usize, places: &mut Vec<Decl>) -> Self {
        let steps = self.steps.iter().flat_map(|step| step.over_chunks(here, places)).collect();
        Self { unread: self.unread.clone(), steps }
    }
}

impl Step {
    fn over_chunks(&self, here: usize, places: &mut Vec<Decl>) -> Vec<Step> {
        match self.call.op {
            Op::Exchange(exchange) => {
                return self.exchange_over_chunks(Exchange { here, ..exchange }, places);
            }
            Op::ExpertAxis(ExpertAxis::Send(_) | ExpertAxis::Return(_)) => {
                return self.rounds_over_chunks(here, places);
            }
            Op::ExpertAxis(_) => return self.expert_axis_over_chunks(here, places),
            _ => {}
        }
        let call = |chunk| self.call.of_chunk(chunk, |id| places[id].len() / here);
        (0..here).map(|chunk| self.of_chunk(chunk, here, call(chunk))).collect()
    }

    /// The step that runs a call for one of the chunks here.
    fn of_chunk(&self, chunk: usize, here: usize, call: Call) -> Step {
        Step {
            call,
            chunk,
            begins: if chunk == 0 { self.begins.clone() } else { Vec::new() },
            // With several chunks, the redistribution of each ends with its call.
            arrivals: Vec::new(),
            ends: if chunk + 1 == here { self.ends.clone() } else { Vec::new() },
        }
    }

    /// The steps of rounds, chunk by chunk. All use the same scratch, because a collective moves whole buffers.
    fn rounds_over_chunks(&self, here: usize, places: &mut [Decl]) -> Vec<Step> {
        let scratch = &self.call.writes[1..];
        for ((operand, _), role) in scratch.iter().zip(&self.call.op.describe().writes[1..]) {
            let place = &mut places[operand.local().expect("scratch is a place")];
            place.rows = role.len / place.width;
        }
        let call = |chunk| {
            let mut call = self.call.of_chunk(chunk, |id| places[id].len() / here);
            call.writes[1..].copy_from_slice(scratch);
            call
        };
        (0..here).map(|chunk| self.of_chunk(chunk, here, call(chunk))).collect()
    }

    /// The steps of an exchange with several chunks on the rank. Their parts are first ordered by the chunk that they go to:
    /// if all chunks are here, that is all. Otherwise each rank sends to every other the parts for its chunks, back to
    /// back, and the parts that it receives are ordered by the chunk that they are for.
    fn exchange_over_chunks(&self, exchange: Exchange, places: &mut Vec<Decl>) -> Vec<Step> {
        let Exchange { chunks, here, part } = exchange;
        let local = |operand: Operand| operand.local().expect("a value is exchanged");
        let (x, y) = (local(self.call.reads[0]), local(self.call.writes[0].0));
        let by_target = |chunk: usize| Rows {
            rows: chunks,
            columns: part,
            from: [chunk * chunks * part, part],
            to: [chunk * part, here * part],
        };
        let mut calls: Vec<Call> = (0..here).map(|chunk| by_target(chunk).copied(x, y)).collect();
        let packed = calls.len();
        let mut received = None;
        if here < chunks {
            places.push(places[y]);
            let z = received.insert(places.len() - 1);
            let whole = |id: usize| Operand::Local { id, offset: 0, len: here * chunks * part };
            calls.push(Call::new(Op::Exchange(exchange), vec![whole(y)], [(whole(*z), false)]));
            let block = here * part;
            let by_chunk = |chunk: usize| Rows {
                rows: chunks / here,
                columns: block,
                from: [chunk * block, here * block],
                to: [chunk * chunks * part, block],
            };
            calls.extend((0..here).map(|chunk| by_chunk(chunk).copied(*z, y)));
        }
        let step = |call: Call| Step {
            arrivals: call.redistribution().map(|redistribution| redistribution.to).into_iter().collect(),
            call,
            chunk: 0,
            begins: Vec::new(),
            ends: Vec::new(),
        };
        let mut steps: Vec<Step> = calls.into_iter().map(step).collect();
        steps[0].begins.clone_from(&self.begins);
        let (early, late): (Vec<usize>, Vec<usize>) = self.ends.iter().partition(|&&id| id == x);
        steps[packed - 1].ends = early;
        if let Some(received) = received {
            steps[packed].begins.push(received);
        }
        steps.last_mut().expect("there are parts to order").ends.extend(late.into_iter().chain(received));
        steps
    }
}

impl Step {
    /// The steps of a redistribution over the expert axis, chunk by chunk: a collective moves whole buffers, so each chunk is
    /// copied out of its place, and the result back into one.
    fn expert_axis_over_chunks(&self, here: usize, places: &mut Vec<Decl>) -> Vec<Step> {
        let local = |operand: Operand| operand.local().expect("a value is redistributed");
        let (x, y) = (local(self.call.reads[0]), local(self.call.writes[0].0));
        let mut of_chunk = |id: usize| {
            let decl = Decl { rows: places[id].rows / here, category: Category::Workspace, ..places[id] };
            places.push(decl);
            (places.len() - 1, decl.len())
        };
        let [(from, from_len), (to, to_len)] = [x, y].map(&mut of_chunk);
        let part = |id: usize, offset: usize, len: usize| Operand::Local { id, offset, len };
        let copy = |from: Operand, to: Operand, len: usize| {
            Call::new(Op::Pointwise(Pointwise::Copy { len }), vec![from], [(to, false)])
        };
        let mut steps = Vec::with_capacity(3 * here);
        for chunk in 0..here {
            let (read, write) = (part(from, 0, from_len), part(to, 0, to_len));
            let calls = [
                copy(part(x, chunk * from_len, from_len), read, from_len),
                Call::new(self.call.op.clone(), vec![read], [(write, false)]),
                copy(write, part(y, chunk * to_len, to_len), to_len),
            ];
            let ranges = [(Some(from), None), (Some(to), Some(from)), (None, Some(to))];
            for (call, (begins, ends)) in calls.into_iter().zip(ranges) {
                let [begins, ends] = [begins, ends].map(|place| place.into_iter().collect());
                let arrivals =
                    call.redistribution().map(|redistribution| redistribution.to).into_iter().collect();
                steps.push(Step { call, chunk: 0, begins, arrivals, ends });
            }
        }
        let last = steps.len() - 1;
        steps[0].begins.extend(&self.begins);
        steps[last].ends.extend(&self.ends);
        steps
    }
}

impl Rows {
    /// The call that copies rows of a place to another one.
    fn copied(self, from: usize, to: usize) -> Call {
        self.call(
            |offset, len| Operand::Local { id: from, offset, len },
            |offset, len| Operand::Local { id: to, offset, len },
        )
    }
}

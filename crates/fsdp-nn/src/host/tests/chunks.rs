//! Tests that the ranks of an expert axis compute parts of what one rank computes that has all chunks of the experts: added in
//! the order of the tree, they have its bits.

use fsdp_core::DType;

use crate::HostMemory;
use crate::conformance::Calls;
use crate::conformance::kit::{Kit, Operand, numbers};
use crate::conformance::routed::Routed;
use crate::conformance::sum_rows::add;
use crate::cuts::Chunks;
use crate::host::HostBuffer;
use crate::op::{Experts, Op, Routing};

const WIDTH: usize = 11;
const ROWS: usize = 13;
/// Rows have experts in every chunk, so that the order of sums matters.
const TOP: usize = 6;
const COUNT: usize = 4;

/// Numbers of all sources, by row or by route; those of slots follow from their routes.
struct Numbers {
    routes: Vec<u32>,
    /// Of every route: the output of its expert, and its weight.
    outputs: Vec<f64>,
    weights: Vec<f64>,
    /// Of every row.
    dy: Vec<f64>,
}

/// Sums of outputs, of their gradients, and gradients of weights.
type Results = [Operand<HostBuffer>; 3];

impl Numbers {
    /// In the first rows, products are too small for f16: their sums are zeros with signs.
    fn new(sources: usize, routing: Routing) -> Self {
        let all = Routing { rows: sources * ROWS, ..routing };
        let numbers = |key: u64, width: usize| {
            let small = |at: usize| if at < 3 * width { 2f64.powi(-14) } else { 1.0 };
            let all = numbers(key, sources * ROWS * width).into_iter().enumerate();
            all.map(|(at, number)| number * small(at)).collect()
        };
        Self {
            routes: Routed::new(all, 3).routes,
            outputs: numbers(1, TOP * WIDTH),
            weights: numbers(2, TOP),
            dy: numbers(4, WIDTH),
        }
    }

    /// Runs the operations that sum over the experts of a row, on a rank that has the rows of sources from `first` on.
    fn run(&self, kit: &Kit<HostMemory>, routing: Routing, first: usize) -> Results {
        let (rows, width) = (first * ROWS..first * ROWS + routing.all_rows(), WIDTH);
        let routes = rows.start * TOP..rows.end * TOP;
        let places = routing.places(&self.routes[routes.clone()]);
        let of_route = |route: &Option<usize>| match route {
            Some(route) => self.outputs[(routes.start + route) * width..][..width].to_vec(),
            None => vec![f64::NAN; width],
        };
        let x = kit.put(&places.route_of_slot.iter().flat_map(of_route).collect::<Vec<f64>>());
        let (weights, ids) = (kit.put(&self.weights[routes.clone()]), kit.ids(&self.routes[routes.clone()]));
        let dy = kit.put(&self.dy[rows.start * width..rows.end * width]);
        let [mut y, mut dx] = [(); 2].map(|()| kit.result(rows.len() * width));
        let (mut dslots, mut dweights) = (kit.result(routing.slots() * width), kit.result(routes.len()));
        let call = |op, reads: &[_], write| kit.memory.call(Op::Experts(op), reads, [write]).unwrap();
        call(Experts::Combine { routing, width }, &[x.read(), weights.read(), ids.read()], y.write());
        call(Experts::DispatchBackward { routing, width }, &[x.read(), ids.read()], dx.write());
        let reads = &[x.read(), weights.read(), ids.read(), dy.read()];
        let op = Op::Experts(Experts::CombineBackward { routing, width });
        kit.memory.call(op, reads, [dslots.write(), dweights.write()]).unwrap();
        [y, dx, dweights]
    }
}

#[test]
fn parts_of_ranks_add_up_to_bits_of_one_rank() {
    for (dtype, ranks) in [DType::F32, DType::F64, DType::Bf16, DType::F16]
        .into_iter()
        .flat_map(|dtype| [(dtype, 2), (dtype, 4)])
    {
        let (kit, here) = (Kit::host(dtype), COUNT / ranks);
        let alone = Routing { rows: ROWS, experts: 8, top: TOP, chunks: Chunks::all(COUNT) };
        let numbers = Numbers::new(ranks, alone);
        let on_rank = |rank: usize| {
            let chunks = Chunks { count: COUNT, first: rank * here, here };
            numbers.run(&kit, Routing { chunks, ..alone }, 0)
        };
        let mut parts: [Vec<_>; 3] = Default::default();
        for rank in 0..ranks {
            parts.iter_mut().zip(on_rank(rank)).for_each(|(parts, part)| parts.push(part));
        }
        let got = parts.map(|parts| kit.get(&add(&kit, parts)));
        for source in 0..ranks {
            let expected = numbers.run(&kit, alone, source).map(|sums| kit.get(&sums));
            for (what, (got, expected)) in
                ["combine", "dispatch_backward", "dweights"].iter().zip(got.iter().zip(&expected))
            {
                let got = got[source * expected.len()..][..expected.len()].iter().map(|sum| sum.to_bits());
                assert!(
                    got.eq(expected.iter().map(|sum| sum.to_bits())),
                    "{what} {dtype}, source {source} of {ranks}"
                );
            }
        }
    }
}

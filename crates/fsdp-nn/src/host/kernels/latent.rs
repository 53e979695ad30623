//! Kernels of latent attention: between its heads and packed rows.

use fsdp_core::Error;

use crate::backend::Outcome;
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::element::{Element, Float};
use crate::host::workers::{Workers, task_rows};
use crate::op::{Latent, LatentDims};

impl HostMemory {
    pub(in crate::host) fn latent<E: Element>(
        &self,
        op: &Latent,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let workers = self.workers();
        match *op {
            Latent::Pack(dims) => {
                let ([q, k_rotating, kv], [packed], _) = operands.split();
                let (q, k_rotating, kv) =
                    (self.elements::<E>(q)?, self.elements(k_rotating)?, self.elements(kv)?);
                pack(workers, dims, (q, k_rotating, kv), self.elements_mut(packed.slice)?);
            }
            Latent::PackBackward(dims) => {
                let ([packed], [q, k_rotating, kv], _) = operands.split();
                let packed = self.elements::<E>(packed)?;
                let (q, k_rotating) = (self.elements_mut(q.slice)?, self.elements_mut(k_rotating.slice)?);
                pack_backward(workers, dims, packed, (q, k_rotating, self.elements_mut(kv.slice)?));
            }
            Latent::Unpack(LatentDims { value, .. }) => {
                let ([x], [y], _) = operands.split();
                let head_dim = x.len / (y.slice.len / value);
                let (x, y) = (self.elements::<E>(x)?, self.elements_mut(y.slice)?);
                each_head(workers, (x, head_dim), (y, value), |x, y| y.copy_from_slice(&x[..value]));
            }
            Latent::UnpackBackward(dims) => {
                let ([dy], [dx], _) = operands.split();
                let (dy, dx) = (self.elements::<E>(dy)?, self.elements_mut(dx.slice)?);
                each_head(workers, (dy, dims.value), (dx, dims.head_dim()), |dy, dx| {
                    dx[..dims.value].copy_from_slice(dy);
                    dx[dims.value..].fill(E::store(E::Acc::ZERO));
                });
            }
        }
        Ok(Outcome::Done)
    }
}

/// Runs over the heads of all rows, which have these widths.
fn each_head<E: Element>(
    workers: &Workers,
    (x, from): (&[E], usize),
    (y, to): (&mut [E], usize),
    run: impl Fn(&[E], &mut [E]) + Sync,
) {
    let heads = task_rows(from.max(to));
    workers.each(y.chunks_mut(heads * to).zip(x.chunks(heads * from)), |(y, x)| {
        y.chunks_exact_mut(to).zip(x.chunks_exact(from)).for_each(|(y, x)| run(x, y));
    });
}

fn pack<E: Element>(
    workers: &Workers,
    dims: LatentDims,
    (q, k_rotating, kv): (&[E], &[E], &[E]),
    packed: &mut [E],
) {
    let LatentDims { heads, fixed, rotating, value, .. } = dims;
    let (head_dim, zero) = (dims.head_dim(), E::store(E::Acc::ZERO));
    let rows = task_rows(3 * heads * head_dim);
    let inputs = q.chunks(rows * heads * dims.query()).zip(k_rotating.chunks(rows * rotating));
    let inputs = inputs.zip(kv.chunks(rows * heads * (fixed + value)));
    workers.each(
        packed.chunks_mut(rows * 3 * heads * head_dim).zip(inputs),
        |(packed, ((q, shared), kv))| {
            let rows = q.chunks_exact(heads * dims.query()).zip(shared.chunks_exact(rotating));
            let rows = rows.zip(kv.chunks_exact(heads * (fixed + value)));
            for (packed, ((q, shared), kv)) in packed.chunks_exact_mut(3 * heads * head_dim).zip(rows) {
                packed.fill(zero);
                let (queries, others) = packed.split_at_mut(heads * head_dim);
                let (keys, values) = others.split_at_mut(heads * head_dim);
                for head in 0..heads {
                    let (q, kv) = (&q[head * dims.query()..], &kv[head * (fixed + value)..]);
                    let of_head = head * head_dim..(head + 1) * head_dim;
                    let (query, key) = (&mut queries[of_head.clone()], &mut keys[of_head.clone()]);
                    for index in 0..rotating {
                        let source = dims.rotating_source(index);
                        (query[index], key[index]) = (q[fixed + source], shared[source]);
                    }
                    query[rotating..][..fixed].copy_from_slice(&q[..fixed]);
                    key[rotating..][..fixed].copy_from_slice(&kv[..fixed]);
                    values[of_head][..value].copy_from_slice(&kv[fixed..][..value]);
                }
            }
        },
    );
}

fn pack_backward<E: Element>(
    workers: &Workers,
    dims: LatentDims,
    packed: &[E],
    (q, k_rotating, kv): (&mut [E], &mut [E], &mut [E]),
) {
    let LatentDims { heads, fixed, rotating, value, .. } = dims;
    let head_dim = dims.head_dim();
    let rows = task_rows(3 * heads * head_dim);
    let outputs = q.chunks_mut(rows * heads * dims.query()).zip(k_rotating.chunks_mut(rows * rotating));
    let outputs = outputs.zip(kv.chunks_mut(rows * heads * (fixed + value)));
    workers.each(packed.chunks(rows * 3 * heads * head_dim).zip(outputs), |(packed, ((q, shared), kv))| {
        let rows = q.chunks_exact_mut(heads * dims.query()).zip(shared.chunks_exact_mut(rotating));
        let rows = rows.zip(kv.chunks_exact_mut(heads * (fixed + value)));
        for (packed, ((q, shared), kv)) in packed.chunks_exact(3 * heads * head_dim).zip(rows) {
            let (queries, others) = packed.split_at(heads * head_dim);
            let (keys, values) = others.split_at(heads * head_dim);
            for head in 0..heads {
                let (q, kv) = (&mut q[head * dims.query()..], &mut kv[head * (fixed + value)..]);
                let of_head = head * head_dim..(head + 1) * head_dim;
                let (query, key) = (&queries[of_head.clone()], &keys[of_head.clone()]);
                for index in 0..rotating {
                    q[fixed + dims.rotating_source(index)] = query[index];
                }
                q[..fixed].copy_from_slice(&query[rotating..][..fixed]);
                kv[..fixed].copy_from_slice(&key[rotating..][..fixed]);
                kv[fixed..][..value].copy_from_slice(&values[of_head][..value]);
            }
            for index in 0..rotating {
                let of_heads = (0..heads).map(|head| keys[head * head_dim + index].load());
                shared[dims.rotating_source(index)] = E::store(of_heads.sum());
            }
        }
    });
}

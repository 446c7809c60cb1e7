//! Embedding, norms, the input of the MTP block, and row copies.

use ninfer_core::backend::DeviceWeight;
use ninfer_core::ops::{CopyRows, Embed, MtpStem, RmsNorm};
use ninfer_core::view::View;
use ninfer_core::{Error, Result};

use super::Cpu;
use super::buffer::Access;
use super::matmul::{Input, Output, matmul};
use super::queue::Scratch;
use super::rows::Rows;
use super::simd::{Isa, Lanes, dispatch, dot};
use super::weight::CpuWeight;

/// `1 / (1 + e^−x)`.
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

dispatch! {
    /// `y = x · rsqrt(mean(x²) + eps) · (1 + gain)`.
    pub(super) fn normalise(x: &[f32], gain: &[f32], eps: f32, y: &mut [f32]) = normalise_body
}

#[inline(always)]
fn normalise_body<L: Lanes>(x: &[f32], gain: &[f32], eps: f32, y: &mut [f32]) {
    let scale = 1.0 / (dot::<L>(x, x) / x.len() as f32 + eps).sqrt();
    for ((y, x), g) in y.iter_mut().zip(x).zip(gain) {
        *y = x * scale * (1.0 + g);
    }
}

/// Writes the embedding of one id; `u32::MAX` gives zeros.
fn embed_row(isa: Isa, table: &CpuWeight, id: u32, out: &mut [f32]) -> Result<()> {
    if id == u32::MAX {
        out.fill(0.0);
        return Ok(());
    }
    let row = id as usize;
    if row >= table.rows() {
        return Err(Error::OutOfRange {
            what: "token id",
            got: id.to_string(),
            legal: format!("0 to {}", table.rows().saturating_sub(1)),
        });
    }
    table.decode_row(isa, row, out);
    Ok(())
}

pub(super) fn embed(op: &Embed<Cpu>, isa: Isa, _scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("embed");
    let rows = Rows::read(&access, "embed", &op.batch)?;
    let ids: &[u32] = access.read("ids", &op.ids)?;
    let y = access.write("output", &op.output)?;
    for t in 0..rows.count {
        let id = if rows.owns(t) { ids[t * op.ids.stride()] } else { u32::MAX };
        embed_row(isa, &op.table, id, &mut y[t * op.output.stride()..][..op.output.cols()])?;
    }
    Ok(())
}

pub(super) fn rms_norm(op: &RmsNorm<Cpu>, isa: Isa, _scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("rms_norm");
    let x = access.read("input", &op.input)?;
    let gain = access.read("gain", &op.norm.gain)?;
    let y = access.write("output", &op.output)?;
    let h = op.input.cols();
    for t in 0..op.batch.rows {
        let row = &x[t * op.input.stride()..][..h];
        normalise(isa, row, gain, op.norm.eps, &mut y[t * op.output.stride()..][..h]);
    }
    Ok(())
}

pub(super) fn mtp_stem(op: &MtpStem<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("mtp_stem");
    let rows = Rows::read(&access, "mtp_stem", &op.batch)?;
    let ids: &[u32] = access.read("ids", &op.ids)?;
    let index: &[i32] = access.read("index", &op.index)?;
    let hidden: &[f32] = access.read("hidden", &op.hidden)?;
    let embedding_gain = access.read("embedding gain", &op.embedding_norm.gain)?;
    let hidden_gain = access.read("hidden gain", &op.hidden_norm.gain)?;
    let h = op.table.cols();
    let Scratch { floats, codes, .. } = scratch;
    let [row, both] = floats.get([h, rows.count * 2 * h])?;
    for t in 0..rows.count {
        let (e, n) = both[t * 2 * h..][..2 * h].split_at_mut(h);
        if !rows.owns(t) {
            e.fill(0.0);
            n.fill(0.0);
            continue;
        }
        embed_row(isa, &op.table, ids[t * op.ids.stride()], row)?;
        normalise(isa, row, embedding_gain, op.embedding_norm.eps, e);
        match usize::try_from(index[t * op.index.stride()]) {
            Ok(i) if i >= op.hidden.rows() => return Err(outside("hidden row", i, &op.hidden)),
            Ok(i) => {
                normalise(isa, &hidden[i * op.hidden.stride()..][..h], hidden_gain, op.hidden_norm.eps, n);
            }
            Err(_) => n.fill(0.0),
        }
    }
    let y = access.write_matrix("output", &op.output, rows.count, op.fc.rows())?;
    matmul(isa, &rows, Input::new(both, 2 * h), &op.fc, &Output::set(y, op.output.stride()), codes)
}

pub(super) fn copy_rows(op: &CopyRows<Cpu>, _isa: Isa, _scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("copy_rows");
    let from: &[i32] = access.read("src_index", &op.src_index)?;
    let to: &[i32] = access.read("dst_index", &op.dst_index)?;
    let size = op.src.dtype().size();
    let (src, dst) = (access.read_bytes("src", &op.src)?, access.write_bytes("dst", &op.dst)?);
    let width = op.src.cols() * size;
    for i in 0..op.src_index.rows() {
        let pair = (from[i * op.src_index.stride()], to[i * op.dst_index.stride()]);
        let (Ok(s), Ok(d)) = (usize::try_from(pair.0), usize::try_from(pair.1)) else { continue };
        if s >= op.src.rows() {
            return Err(outside("source row", s, &op.src));
        }
        if d >= op.dst.rows() {
            return Err(outside("destination row", d, &op.dst));
        }
        let (s, d) = (s * op.src.stride() * size, d * op.dst.stride() * size);
        dst[d..d + width].copy_from_slice(&src[s..s + width]);
    }
    Ok(())
}

fn outside(what: &'static str, index: usize, view: &View<Cpu>) -> Error {
    Error::OutOfRange { what, got: index.to_string(), legal: format!("below {}", view.rows()) }
}

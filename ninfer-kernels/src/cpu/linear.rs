//! Projections.

use ninfer_core::Result;
use ninfer_core::backend::DeviceWeight;
use ninfer_core::ops::{Norm, Project, ProjectAdd, Swiglu};
use ninfer_core::view::View;

use super::Cpu;
use super::buffer::Access;
use super::matmul::{Input, Output, matmul};
use super::norm::{normalise, sigmoid};
use super::queue::Scratch;
use super::rows::Rows;
use super::simd::Isa;

pub(super) fn project(op: &Project<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("project");
    let rows = Rows::read(&access, "project", &op.batch)?;
    let Scratch { floats, codes, .. } = scratch;
    let [normed] = floats.get([norm_len(&op.input, op.norm.as_ref())])?;
    let input = input(&access, &op.input, op.norm.as_ref(), normed, isa)?;
    for (weight, out) in &op.parts {
        let y = access.write_matrix("output", out, rows.count, weight.rows())?;
        matmul(isa, &rows, input, weight, &Output::set(y, out.stride()), codes)?;
    }
    Ok(())
}

pub(super) fn project_add(op: &ProjectAdd<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("project_add");
    let rows = Rows::read(&access, "project_add", &op.batch)?;
    let x = access.read("input", &op.input)?;
    let y = access.write_matrix("residual", &op.residual, rows.count, op.weight.rows())?;
    let output = Output::add(y, op.residual.stride());
    matmul(isa, &rows, Input::new(x, op.input.stride()), &op.weight, &output, &mut scratch.codes)
}

pub(super) fn swiglu(op: &Swiglu<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("swiglu");
    let rows = Rows::read(&access, "swiglu", &op.batch)?;
    let width = op.output.cols();
    let Scratch { floats, codes, .. } = scratch;
    let [normed, both] = floats.get([norm_len(&op.input, op.norm.as_ref()), rows.count * 2 * width])?;
    let input = input(&access, &op.input, op.norm.as_ref(), normed, isa)?;
    matmul(isa, &rows, input, &op.gate_up, &Output::set(both, 2 * width), codes)?;
    let y = access.write_matrix("output", &op.output, rows.count, op.gate_up.rows() / 2)?;
    for t in 0..rows.count {
        combine(&both[t * 2 * width..][..2 * width], &mut y[t * op.output.stride()..][..width]);
    }
    Ok(())
}

/// `y = silu(gate) ⊙ up` for one row of gates followed by ups.
pub(super) fn combine(gate_up: &[f32], y: &mut [f32]) {
    let (gate, up) = gate_up.split_at(y.len());
    for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
        *y = g * sigmoid(*g) * u;
    }
}

fn norm_len(input: &View<Cpu>, norm: Option<&Norm<Cpu>>) -> usize {
    if norm.is_some() { input.rows() * input.cols() } else { 0 }
}

/// The input of a projection: the view itself, or its normed rows in `normed`.
fn input<'a>(
    access: &'a Access,
    view: &View<Cpu>,
    norm: Option<&Norm<Cpu>>,
    normed: &'a mut [f32],
    isa: Isa,
) -> Result<Input<'a>> {
    let x = access.read("input", view)?;
    let Some(norm) = norm else {
        return Ok(Input::new(x, view.stride()));
    };
    let gain = access.read("gain", &norm.gain)?;
    let h = view.cols();
    for t in 0..view.rows() {
        normalise(isa, &x[t * view.stride()..][..h], gain, norm.eps, &mut normed[t * h..][..h]);
    }
    Ok(Input::new(normed, h))
}

//! The layer graph: which operations a pass over some rows submits.

use ninfer_core::Result;
use ninfer_core::backend::{DeviceWeight, InferenceBackend, Recorder};
use ninfer_core::ops::{
    Attend, Embed, Experts, GdnMix, KvLayer, Norm, Project, ProjectAdd, RmsNorm, RopeAppend, RopeTable, Route, Swiglu,
};
use ninfer_core::segment::Batch;
use ninfer_core::view::View;

use super::{AttentionWeights, FfnWeights, GdnWeights, LayerWeights, Mixer, Qwen35};
use crate::session::activations::Rows;
use crate::session::cache::{Cache, GdnCache};

/// How the attention of a pass addresses its cache.
#[derive(Clone, Copy)]
pub(crate) struct Addressing {
    /// Rotary position = position − shift.
    pub(crate) shift: u32,
    /// First visible key.
    pub(crate) first_key: u32,
}

impl<B: InferenceBackend> Qwen35<B> {
    /// Embedding and all layers over the rows of a batch; the residual stream ends in `rows.x`.
    ///
    /// `record` selects record-and-fold for the recurrent state (steps) instead of advancing it (prompt chunks).
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn trunk(
        &self,
        rec: &mut Recorder<'_, B>,
        batch: &Batch<B>,
        ids: &View<B>,
        rows: &Rows<B>,
        cache: &Cache<B>,
        record: bool,
        tap: &mut dyn FnMut(&mut Recorder<'_, B>, usize) -> Result<()>,
    ) -> Result<()> {
        rec.embed(Embed {
            batch: batch.clone(),
            ids: ids.clone(),
            table: self.embedding().clone(),
            output: rows.x.clone(),
        })?;
        let (mut full, mut linear) = (0, 0);
        for (i, layer) in self.layer_weights().iter().enumerate() {
            match &layer.mixer {
                Mixer::Attention(w) => {
                    let at = Addressing { shift: 0, first_key: 0 };
                    self.attention(rec, batch, &layer.input_norm, w, rows, &cache.kv[full], at)?;
                    full += 1;
                }
                Mixer::Gdn(w) => {
                    gdn(rec, batch, &layer.input_norm, w, rows, &cache.gdn[linear], record)?;
                    linear += 1;
                }
            }
            ffn(rec, batch, layer, rows)?;
            tap(rec, i)?;
        }
        Ok(())
    }

    /// The final norm: `rows.x` to `output`.
    pub(crate) fn final_norm(
        &self,
        rec: &mut Recorder<'_, B>,
        batch: &Batch<B>,
        rows: &Rows<B>,
        output: &View<B>,
    ) -> Result<()> {
        rec.rms_norm(RmsNorm {
            batch: batch.clone(),
            input: rows.x.clone(),
            norm: Norm { gain: self.0.final_norm.clone(), eps: self.0.config.eps as f32 },
            output: output.clone(),
        })
    }

    /// One full-attention layer without its feed-forward block, added to `rows.x`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn attention(
        &self,
        rec: &mut Recorder<'_, B>,
        batch: &Batch<B>,
        norm: &Norm<B>,
        w: &AttentionWeights<B>,
        rows: &Rows<B>,
        kv: &KvLayer<B>,
        at: Addressing,
    ) -> Result<()> {
        rec.project(Project {
            batch: batch.clone(),
            input: rows.x.clone(),
            norm: Some(norm.clone()),
            parts: vec![
                (w.query_gate.clone(), rows.query_gate.clone()),
                (w.key.clone(), rows.key.clone()),
                (w.value.clone(), rows.value.clone()),
            ],
        })?;
        rec.rope_append(RopeAppend {
            batch: batch.clone(),
            query_gate: rows.query_gate.clone(),
            key: rows.key.clone(),
            value: rows.value.clone(),
            gains: w.gains.clone(),
            eps: norm.eps,
            rope: RopeTable { frequencies: self.0.frequencies.clone(), magnitude: self.0.magnitude, shift: at.shift },
            query: rows.query.clone(),
            kv: kv.clone(),
        })?;
        rec.attend(Attend {
            batch: batch.clone(),
            query: rows.query.clone(),
            query_gate: rows.query_gate.clone(),
            kv: kv.clone(),
            first_key: at.first_key,
            output: rows.attended.clone(),
        })?;
        rec.project_add(ProjectAdd {
            batch: batch.clone(),
            input: rows.attended.clone(),
            weight: w.output.clone(),
            residual: rows.x.clone(),
        })
    }
}

fn gdn<B: InferenceBackend>(
    rec: &mut Recorder<'_, B>,
    batch: &Batch<B>,
    norm: &Norm<B>,
    w: &GdnWeights<B>,
    rows: &Rows<B>,
    cache: &GdnCache<B>,
    record: bool,
) -> Result<()> {
    let others = [(&w.z, &rows.z), (&w.a, &rows.a), (&w.b, &rows.b)];
    for (i, (first, weight)) in w.qkv.iter().enumerate() {
        // Outputs of one operation may not interleave in a buffer, so each further piece has an operation of its own.
        let mut parts = vec![(weight.clone(), rows.qkv.col_range(*first..first + weight.rows())?)];
        if i == 0 {
            parts.extend(others.map(|(weight, out)| (weight.clone(), out.clone())));
        }
        rec.project(Project { batch: batch.clone(), input: rows.x.clone(), norm: Some(norm.clone()), parts })?;
    }
    rec.gdn_mix(GdnMix {
        batch: batch.clone(),
        qkv: rows.qkv.clone(),
        z: rows.z.clone(),
        a: rows.a.clone(),
        b: rows.b.clone(),
        params: w.params.clone(),
        state: cache.state.clone(),
        record: record.then(|| cache.record.clone()),
        output: rows.mixed.clone(),
    })?;
    rec.project_add(ProjectAdd {
        batch: batch.clone(),
        input: rows.mixed.clone(),
        weight: w.output.clone(),
        residual: rows.x.clone(),
    })
}

/// The feed-forward block of a layer, added to `rows.x`.
pub(super) fn ffn<B: InferenceBackend>(
    rec: &mut Recorder<'_, B>,
    batch: &Batch<B>,
    layer: &LayerWeights<B>,
    rows: &Rows<B>,
) -> Result<()> {
    let norm = layer.ffn_norm.clone();
    match &layer.ffn {
        FfnWeights::Dense { gate_up, down } => {
            rec.swiglu(Swiglu {
                batch: batch.clone(),
                input: rows.x.clone(),
                norm: Some(norm),
                gate_up: gate_up.clone(),
                output: rows.mid.clone(),
            })?;
            rec.project_add(ProjectAdd {
                batch: batch.clone(),
                input: rows.mid.clone(),
                weight: down.clone(),
                residual: rows.x.clone(),
            })
        }
        FfnWeights::Moe { router, shared_gate, gate_up, down, shared_gate_up, shared_down, renormalise } => {
            rec.route(Route {
                batch: batch.clone(),
                input: rows.x.clone(),
                norm,
                router: router.clone(),
                shared_gate: shared_gate.clone(),
                renormalise: *renormalise,
                hidden: rows.mid.clone(),
                experts: rows.experts.clone(),
                weights: rows.expert_weights.clone(),
            })?;
            rec.experts(Experts {
                batch: batch.clone(),
                hidden: rows.mid.clone(),
                experts: rows.experts.clone(),
                weights: rows.expert_weights.clone(),
                gate_up: gate_up.clone(),
                down: down.clone(),
                shared_gate_up: shared_gate_up.clone(),
                shared_down: shared_down.clone(),
                residual: rows.x.clone(),
            })
        }
    }
}

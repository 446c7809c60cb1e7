//! The `{% generation %}` tag of training templates.
//!
//! Some templates mark the assistant's words with `{% generation %} … {% endgeneration %}` so that a trainer can find
//! them. Rendering a prompt only needs their content: the tags become a condition that always holds, which keeps
//! their trimming of white space.

/// Replaces the words `generation` and `endgeneration` where they are the whole of a block tag.
pub(super) fn neutralize(source: String) -> String {
    if !source.contains("generation") {
        return source;
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_start_matches("{%").trim_matches(['-', '+', ' ', '\t', '\r', '\n']);
        match word {
            "generation" => out.push_str(&tag.replacen(word, "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen(word, "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_tags_are_replaced() {
        let source = "{%- generation -%}a{% if add_generation_prompt %}generation{% endif %}{%endgeneration%}{% x";
        let want = "{%- if true -%}a{% if add_generation_prompt %}generation{% endif %}{%endif%}{% x";
        assert_eq!(neutralize(source.to_owned()), want);
    }
}

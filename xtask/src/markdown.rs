//! As much of Markdown as it takes to find links and headings.

/// A link and the line it stands in, counted from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub line: usize,
    pub target: String,
}

/// Lines outside code blocks with their numbers, inline code taken out.
fn prose(text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut fence: Option<&str> = None;
    text.lines().enumerate().filter_map(move |(i, line)| {
        let start = line.trim_start();
        let mark = ["```", "~~~"].into_iter().find(|m| start.starts_with(m));
        match (fence, mark) {
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            (None, None) => return Some((i + 1, without_code(line))),
            _ => {}
        }
        None
    })
}

/// The line with what stands between backquotes left out; an unpaired backquote is an ordinary character.
fn without_code(line: &str) -> String {
    let mut out = String::new();
    let mut rest = line;
    while let Some(at) = rest.find('`') {
        let ticks = rest[at..].len() - rest[at..].trim_start_matches('`').len();
        let (mark, behind) = rest[at..].split_at(ticks);
        out.push_str(&rest[..at]);
        match behind.find(mark) {
            Some(end) => rest = &behind[end + ticks..],
            None => {
                out.push_str(mark);
                rest = behind;
            }
        }
    }
    out + rest
}

/// Targets of `[text](target)`, `![text](target)` and `[label]: target`.
pub fn links(text: &str) -> Vec<Link> {
    let mut links = Vec::new();
    for (line, prose) in prose(text) {
        let mut push = |target: &str| {
            // A title may follow the target, and angle brackets may stand around it.
            let target = target.split_whitespace().next().unwrap_or_default();
            links.push(Link { line, target: target.trim_matches(['<', '>']).to_owned() });
        };
        for (at, _) in prose.match_indices("](") {
            push(inside(&prose[at + 2..]));
        }
        if let Some((label, target)) = prose.trim_start().split_once("]: ")
            && label.starts_with('[')
            && !label.contains(']')
        {
            push(target);
        }
    }
    links
}

/// Text up to the parenthesis that closes one opened before it.
fn inside(text: &str) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' if depth == 0 => return &text[..at],
            ')' => depth -= 1,
            _ => {}
        }
    }
    text
}

/// Names by which headings are linked: lower case, spaces as hyphens, no other signs.
pub fn anchors(text: &str) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let title = line.trim_start_matches('#');
        if fenced || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let name: String = title
            .trim()
            .to_lowercase()
            .chars()
            .filter(|&c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let same = anchors.iter().filter(|&a| *a == name).count();
        anchors.push(if same == 0 { name } else { format!("{name}-{same}") });
    }
    anchors
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(text: &str) -> Vec<String> {
        links(text).into_iter().map(|l| l.target).collect()
    }

    #[test]
    fn all_kinds_of_links_are_found() {
        assert_eq!(targets("see [a](b.md), ![c](d(1).png \"title\")\n[e]: <f.md>\n"), ["b.md", "d(1).png", "f.md"]);
        assert_eq!(links("\n\n[a](b)"), [Link { line: 3, target: "b".to_owned() }]);
        assert_eq!(targets("[`x`](y.md#z)"), ["y.md#z"]);
    }

    #[test]
    fn code_has_no_links() {
        assert!(targets("```\n[a](b)\n```\n~~~\n```[a](b)\n~~~\n`[a](b)` ``x ` [a](b)``\n").is_empty());
        assert_eq!(targets("a ` b [c](d)"), ["d"]);
    }

    #[test]
    fn other_text_is_no_link() {
        assert!(targets("f[x] (y), [z], a]: b, [T, H]: rows [x]: y").is_empty());
    }

    #[test]
    fn headings_get_their_names() {
        let text = "# The `Backend`, and more\n## Two words\n```\n# no\n```\n## Two words\n#hashtag\n";
        assert_eq!(anchors(text), ["the-backend-and-more", "two-words", "two-words-1"]);
    }
}

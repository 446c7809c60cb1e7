//! License expressions as SPDX defines them, and the slash that older manifests write for OR.
//!
//! ```text
//! or   := and (("OR" | "/") and)*
//! and  := unit ("AND" unit)*
//! unit := "(" or ")" | license ["WITH" exception]
//! ```

use std::fmt;
use std::str::FromStr;

/// Parentheses may be nested this deep.
const MAX_DEPTH: usize = 32;

/// A parsed expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expression {
    /// A license, with its exception: `MIT`, `Apache-2.0 WITH LLVM-exception`.
    License(String),
    /// All of them hold.
    All(Vec<Self>),
    /// One of them is chosen.
    Any(Vec<Self>),
}

/// Why a text is no expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParseError {
    /// It ends where a license was expected, or before a parenthesis is closed.
    End,
    /// A word or sign that cannot stand where it stands.
    Unexpected(String),
    /// Parentheses are nested too deep.
    Depth,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::End => f.write_str("the license expression ends too early"),
            Self::Unexpected(token) => write!(f, "unexpected {token:?} in the license expression"),
            Self::Depth => write!(f, "more than {MAX_DEPTH} nested parentheses in the license expression"),
        }
    }
}

impl Expression {
    /// Whether some choice among alternatives leaves only allowed licenses. An exception belongs to the name that is asked
    /// about.
    pub fn is_satisfied_by(&self, allowed: &dyn Fn(&str) -> bool) -> bool {
        match self {
            Self::License(name) => allowed(name),
            Self::All(parts) => parts.iter().all(|p| p.is_satisfied_by(allowed)),
            Self::Any(parts) => parts.iter().any(|p| p.is_satisfied_by(allowed)),
        }
    }
}

impl FromStr for Expression {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let spaced: String =
            text.chars().flat_map(|c| if matches!(c, '(' | ')' | '/') { vec![' ', c, ' '] } else { vec![c] }).collect();
        let mut tokens = Tokens { rest: spaced.split_whitespace().collect(), at: 0 };
        let expression = tokens.any(0)?;
        match tokens.peek() {
            None => Ok(expression),
            Some(token) => Err(ParseError::Unexpected(token.to_owned())),
        }
    }
}

struct Tokens<'a> {
    rest: Vec<&'a str>,
    at: usize,
}

impl<'a> Tokens<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.rest.get(self.at).copied()
    }

    fn next(&mut self) -> Result<&'a str, ParseError> {
        let token = self.peek().ok_or(ParseError::End)?;
        self.at += 1;
        Ok(token)
    }

    fn take(&mut self, wanted: &[&str]) -> bool {
        let found = self.peek().is_some_and(|t| wanted.contains(&t));
        self.at += usize::from(found);
        found
    }

    fn any(&mut self, depth: usize) -> Result<Expression, ParseError> {
        let mut parts = vec![self.all(depth)?];
        while self.take(&["OR", "/"]) {
            parts.push(self.all(depth)?);
        }
        Ok(single(parts, Expression::Any))
    }

    fn all(&mut self, depth: usize) -> Result<Expression, ParseError> {
        let mut parts = vec![self.unit(depth)?];
        while self.take(&["AND"]) {
            parts.push(self.unit(depth)?);
        }
        Ok(single(parts, Expression::All))
    }

    fn unit(&mut self, depth: usize) -> Result<Expression, ParseError> {
        if depth > MAX_DEPTH {
            return Err(ParseError::Depth);
        }
        if self.take(&["("]) {
            let inner = self.any(depth + 1)?;
            return match self.next()? {
                ")" => Ok(inner),
                token => Err(ParseError::Unexpected(token.to_owned())),
            };
        }
        let license = self.name()?.to_owned();
        if self.take(&["WITH"]) {
            return Ok(Expression::License(format!("{license} WITH {}", self.name()?)));
        }
        Ok(Expression::License(license))
    }

    fn name(&mut self) -> Result<&'a str, ParseError> {
        let token = self.next()?;
        let is_name = !matches!(token, "OR" | "AND" | "WITH")
            && token.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '+' | ':'));
        if is_name { Ok(token) } else { Err(ParseError::Unexpected(token.to_owned())) }
    }
}

fn single(mut parts: Vec<Expression>, many: fn(Vec<Expression>) -> Expression) -> Expression {
    match (parts.len(), parts.pop()) {
        (1, Some(only)) => only,
        (_, last) => many(parts.into_iter().chain(last).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Expression, ParseError> {
        text.parse()
    }

    fn license(name: &str) -> Expression {
        Expression::License(name.to_owned())
    }

    #[test]
    fn and_binds_closer_than_or() {
        let expected = Expression::Any(vec![license("A"), Expression::All(vec![license("B"), license("C")])]);
        assert_eq!(parse("A OR B AND C"), Ok(expected.clone()));
        assert_eq!(parse("A/(B AND C)"), Ok(expected));
        let grouped = Expression::All(vec![Expression::Any(vec![license("A"), license("B")]), license("C")]);
        assert_eq!(parse("(A OR B) AND C"), Ok(grouped));
    }

    #[test]
    fn with_belongs_to_the_license_before_it() {
        let expected = Expression::Any(vec![license("A-1.0 WITH E"), license("B+")]);
        assert_eq!(parse("A-1.0 WITH E OR B+"), Ok(expected));
        assert_eq!(parse("(A) WITH E"), Err(ParseError::Unexpected("WITH".to_owned())));
    }

    #[test]
    fn longer_chains_stay_flat() {
        assert_eq!(parse("A OR B OR C"), Ok(Expression::Any(vec![license("A"), license("B"), license("C")])));
        assert_eq!(parse("((A))"), Ok(license("A")));
    }

    #[test]
    fn what_is_no_expression_is_refused() {
        for text in ["", "  ", "(A", "A OR", "A AND", "A WITH", "OR A", "A WITH OR"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
        assert_eq!(parse("A)"), Err(ParseError::Unexpected(")".to_owned())));
        assert_eq!(parse("A B"), Err(ParseError::Unexpected("B".to_owned())));
        assert_eq!(parse("A or B"), Err(ParseError::Unexpected("or".to_owned())));
        assert_eq!(parse("(A"), Err(ParseError::End));
        assert_eq!(parse("A, B"), Err(ParseError::Unexpected("A,".to_owned())));
        let deep = "(".repeat(100_000);
        assert_eq!(parse(&deep), Err(ParseError::Depth));
    }

    #[test]
    fn satisfaction_follows_the_tree() {
        let allowed = |name: &str| matches!(name, "A" | "B WITH E");
        let holds = |text: &str| parse(text).unwrap().is_satisfied_by(&allowed);
        assert!(holds("A") && holds("X OR A") && holds("A AND (X OR B WITH E)"));
        assert!(!holds("X") && !holds("A AND X") && !holds("B") && !holds("A WITH E"));
    }
}

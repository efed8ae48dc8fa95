#include "ptx.h"

#include <algorithm>
#include <cctype>
#include <cstdarg>
#include <cstdlib>
#include <set>

namespace simulator {

void fail(char const* category, char const* format, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Failure(category, text);
}

bool Statement::has(char const* modifier) const {
  return std::find(modifiers.begin() + 1, modifiers.end(), modifier) != modifiers.end();
}

namespace {

std::string trim(std::string const& s) {
  size_t const first = s.find_first_not_of(" \t\r\n"), last = s.find_last_not_of(" \t\r\n");
  return first == std::string::npos ? "" : s.substr(first, last - first + 1);
}

// Splits at a separator that stands outside brackets.
std::vector<std::string> split(std::string const& s, char separator) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (char c : s) {
    depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
    if (c == separator && depth == 0) {
      parts.push_back(trim(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trim(part).empty()) parts.push_back(trim(part));
  return parts;
}

int type_size(std::string const& type) {  // ".b32" -> 4
  if (type == ".pred") return 0;
  size_t const digit = type.find_first_of("0123456789");
  if (digit == std::string::npos) fail("ptx", "type %s is not known", type.c_str());
  return atoi(type.c_str() + digit) / 8 * (type.find("x2") != std::string::npos ? 2 : 1);
}

std::string without_comments(std::string const& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, 2, "//") == 0)
      while (i < text.size() && text[i] != '\n') ++i;
    else if (text.compare(i, 2, "/*") == 0)
      i = text.find("*/", i) + 2;
    if (i < text.size()) out += text[i];
  }
  return out;
}

// Of -lineinfo: lines that end without a semicolon, and sections of their own.
std::string without_line_numbers(std::string const& text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    size_t end = std::min(text.find('\n', i), text.size());
    std::string const line = trim(text.substr(i, end - i));
    if (line.compare(0, 8, ".section") == 0) {
      end = std::min(text.find('}', i), text.size());
    } else if (line.compare(0, 5, ".loc\t") != 0 && line.compare(0, 5, ".loc ") != 0 &&
               line.compare(0, 5, ".file") != 0) {
      out.append(text, i, end - i);
    }
    out += '\n';
    i = end + 1;
  }
  return out;
}

// Names are visible in their block and the blocks within it; inline assembly opens blocks of its own.
class Body {
 public:
  explicit Body(Kernel& kernel) : kernel_(kernel), scopes_(1) {}

  void run(std::string const& text) {
    std::string current;
    int brackets = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      char const c = text[i];
      bool const empty = trim(current).empty();
      if (c == '{' && empty && brackets == 0) {
        scopes_.emplace_back(Scope{path_.back(), {}, {}});
        path_.push_back(int(scopes_.size()) - 1);
      } else if (c == '}' && empty && brackets == 0) {
        path_.pop_back();
      } else if (c == ':' && brackets == 0 && text[i + 1] != ':' && text[i - 1] != ':' &&
                 trim(current).find_first_of(" \t.%@") == std::string::npos) {
        scopes_[path_.back()].labels[trim(current)] = int(kernel_.statements.size());
        current.clear();
      } else if (c == ';' && brackets == 0) {
        statement(trim(current));
        current.clear();
      } else {
        brackets += (c == '{' || c == '(') - (c == '}' || c == ')');
        current += c;
      }
    }
    for (auto [index, scope] : branches_) {
      Statement& branch = kernel_.statements[index];
      for (int s = scope; s >= 0 && branch.target < 0; s = scopes_[s].parent)
        if (auto found = scopes_[s].labels.find(branch.label); found != scopes_[s].labels.end())
          branch.target = found->second;
      if (branch.target < 0) fail("ptx", "no label %s", branch.label.c_str());
    }
  }

 private:
  struct Scope {
    int parent = -1;
    std::map<std::string, int> registers, labels;
  };

  int find(std::string const& name) const {
    for (int s = path_.back(); s >= 0; s = scopes_[s].parent)
      if (auto found = scopes_[s].registers.find(name); found != scopes_[s].registers.end()) return found->second;
    return -1;
  }

  void declare(std::string const& name, int size) {
    scopes_[path_.back()].registers[name] = int(kernel_.registers.size());
    kernel_.registers.push_back({name, size});
  }

  void declare_registers(std::string const& text) {  // .reg .b32 %r<17>, %x
    size_t const type = text.find('.', 4), end = text.find_first_of(" \t\n", type);
    int const size = type_size(text.substr(type, end - type));
    for (std::string const& name : split(text.substr(end), ',')) {
      size_t const angle = name.find('<');
      if (angle == std::string::npos) {
        declare(name, size);
      } else {
        for (int i = 0; i < atoi(name.c_str() + angle + 1); ++i)
          declare(name.substr(0, angle) + std::to_string(i), size);
      }
    }
  }

  Operand operand(std::string s) const {
    s = trim(s);
    Operand o;
    if (s.empty()) fail("ptx", "an operand is empty");
    if (s[0] == '[') {
      auto const inside = split(s.substr(1, s.size() - 2), ',');
      o = operand(inside[0]);
      o.memory = true;
      for (size_t i = 1; i < inside.size(); ++i) {
        Operand const extra = operand(inside[i]);
        if (extra.kind == Operand::kVector) o.parts = extra.parts;
      }
      return o;
    }
    if (s[0] == '{') {
      o.kind = Operand::kVector;
      for (std::string const& part : split(s.substr(1, s.size() - 2), ',')) o.parts.push_back(operand(part));
      return o;
    }
    if (s == "_") return o;
    if (s[0] == '!') {
      o = operand(s.substr(1));
      o.negated = true;
      return o;
    }
    if (size_t const bar = s.find('|'); bar != std::string::npos) {
      o = operand(s.substr(0, bar));
      o.parts = {operand(s.substr(bar + 1))};
      return o;
    }
    if (isdigit(s[0]) || s[0] == '-') return immediate(s);
    if (size_t const plus = s.find_first_of("+-", 1); plus != std::string::npos) {
      o = operand(s.substr(0, plus));
      std::string tail = s.substr(plus);
      if (tail[0] == '+') tail = tail.substr(1);
      o.offset = strtoll(trim(tail).c_str(), nullptr, 0);
      return o;
    }
    if (int const reg = find(s); reg >= 0) {
      o.kind = Operand::kRegister;
      o.reg = reg;
    } else {
      o.kind = s[0] == '%' ? Operand::kSpecial : Operand::kSymbol;
      o.name = s;
    }
    return o;
  }

  static Operand immediate(std::string const& s) {
    Operand o;
    o.kind = Operand::kImmediate;
    if (s.size() > 2 && s[0] == '0' && strchr("fFdD", s[1])) {
      o.is_float = true;
      o.immediate = strtoull(s.c_str() + 2, nullptr, 16);
    } else {
      o.immediate = s[0] == '-' ? u64(strtoll(s.c_str(), nullptr, 0)) : strtoull(s.c_str(), nullptr, 0);
    }
    return o;
  }

  void statement(std::string s);

  Kernel& kernel_;
  std::vector<Scope> scopes_;
  std::vector<int> path_{0};
  std::vector<std::pair<int, int>> branches_;
};

Variable variable(std::string const& text) {  // .shared .align 4 .b8 name[8] = {...}
  Variable v;
  std::string const declaration = text.substr(0, text.find('='));
  v.external = declaration.find(".extern") != std::string::npos;
  if (size_t const a = declaration.find(".align"); a != std::string::npos)
    v.alignment = atoi(declaration.c_str() + a + 6);
  std::vector<std::string> words;
  for (size_t i = 0; i < declaration.size();) {
    size_t const first = declaration.find_first_not_of(" \t\r\n", i);
    if (first == std::string::npos) break;
    size_t const last = std::min(declaration.find_first_of(" \t\r\n", first), declaration.size());
    words.push_back(declaration.substr(first, last - first));
    i = last;
  }
  std::string name = words.back(), type = ".b8";
  for (std::string const& w : words)
    if (w.size() > 1 && w[0] == '.' && strchr("bufsp", w[1]) && w.find_first_of("0123456789") != std::string::npos)
      type = w;
  u64 count = 1;
  for (size_t open = name.find('['); open != std::string::npos; open = name.find('[', open + 1))
    count *= strtoull(name.c_str() + open + 1, nullptr, 0);
  v.name = name.substr(0, name.find('['));
  int const size = type_size(type);
  v.bytes = count * size;
  v.alignment = std::max(v.alignment, size);
  if (size_t const equals = text.find('='); equals != std::string::npos) {
    std::string values = trim(text.substr(equals + 1));
    if (values[0] == '{') values = values.substr(1, values.rfind('}') - 1);
    for (std::string const& value : split(values, ',')) {
      bool const is_float = value.size() > 2 && value[0] == '0' && strchr("fFdD", value[1]);
      if (!is_float && !isdigit(value[0]) && value[0] != '-')
        fail("ptx", "the initial value %s of %s is not known", value.c_str(), v.name.c_str());
      u64 const bits = is_float ? strtoull(value.c_str() + 2, nullptr, 16) : strtoull(value.c_str(), nullptr, 0);
      for (int i = 0; i < size; ++i) v.initial.push_back(u8(bits >> 8 * i));
    }
  }
  return v;
}

void Body::statement(std::string s) {
  if (s.empty()) return;
  if (s[0] == '.') {
    if (s.compare(0, 4, ".reg") == 0) return declare_registers(s);
    if (s.compare(0, 7, ".shared") == 0) return kernel_.shared.push_back(variable(s));
    if (s.compare(0, 6, ".local") == 0) return kernel_.local.push_back(variable(s));
    if (s.compare(0, 6, ".param") == 0 || s.compare(0, 7, ".pragma") == 0) return;
    if (s.compare(0, 14, ".branchtargets") == 0 || s.compare(0, 13, ".callprototyp") == 0) return;
    fail("ptx", "directive %s is not known", s.substr(0, 40).c_str());
  }
  Statement x;
  x.text = s;
  if (s[0] == '@') {
    size_t const end = s.find_first_of(" \t\n");
    x.guard_negated = s[1] == '!';
    std::string const name = s.substr(1 + x.guard_negated, end - 1 - x.guard_negated);
    x.guard = find(name);
    if (x.guard < 0) fail("ptx", "predicate %s is not declared", name.c_str());
    s = trim(s.substr(end));
  }
  size_t const end = std::min(s.find_first_of(" \t\n{["), s.size());
  x.opcode = s.substr(0, end);
  std::string const rest = trim(s.substr(end));
  for (size_t i = 0; i <= x.opcode.size();) {
    size_t const dot = std::min(x.opcode.find('.', i), x.opcode.size());
    x.modifiers.push_back(x.opcode.substr(i, dot - i));
    i = dot + 1;
  }
  if (x.base() == "bra") {
    x.label = rest;
    branches_.push_back({int(kernel_.statements.size()), path_.back()});
  } else if (x.base() == "call") {
    x.label = rest;
  } else {
    for (std::string const& o : split(rest, ',')) x.operands.push_back(operand(o));
  }
  kernel_.statements.push_back(x);
}

void performance_directives(Kernel& kernel, std::string const& text) {
  for (std::string line : split(text, '\n')) {
    line = trim(line);
    size_t const end = std::min(line.find_first_of(" \t"), line.size());
    std::string const name = line.substr(0, end);
    auto const values = split(line.substr(end), ',');
    auto fill = [&](u32* out) {
      for (int i = 0; i < 3; ++i) out[i] = i < int(values.size()) ? u32(atoi(values[i].c_str())) : 1;
    };
    if (name == ".maxntid" || name == ".reqntid") {
      fill(kernel.max_threads);
      kernel.exact_threads = name == ".reqntid";
    } else if (name == ".reqnctapercluster") {
      fill(kernel.cluster);
    } else if (name == ".maxnreg") {
      kernel.max_registers = u32(atoi(values[0].c_str()));
    }
  }
}

// The index after the bracket that closes the one at `open`.
size_t closing(std::string const& text, size_t open, char left, char right) {
  int depth = 0;
  for (size_t i = open; i < text.size(); ++i) {
    depth += (text[i] == left) - (text[i] == right);
    if (depth == 0) return i + 1;
  }
  fail("ptx", "a %c is not closed", left);
}

}  // namespace

Module parse_ptx(std::string const& source) {
  std::string const text = without_line_numbers(without_comments(source.substr(0, source.find('\0'))));
  Module module;
  for (size_t i = 0; i < text.size();) {
    i = text.find_first_not_of(" \t\r\n", i);
    if (i == std::string::npos) break;
    std::string const line = text.substr(i, text.find('\n', i) - i);
    if (line.compare(0, 8, ".version") == 0 || line.compare(0, 13, ".address_size") == 0 ||
        line.compare(0, 7, ".target") == 0) {
      i += line.size();
      continue;
    }
    size_t const semicolon = text.find(';', i), brace = text.find('{', i);
    if (semicolon == std::string::npos) fail("ptx", "the text ends within a declaration: %s", line.c_str());
    bool const entry = line.find(".entry") != std::string::npos, function = line.find(".func") != std::string::npos;
    if (entry || (function && brace < semicolon)) {
      size_t const body_end = closing(text, brace, '{', '}');
      if (entry) {
        Kernel kernel;
        size_t const open = text.find('(', i);
        size_t const close = open < brace ? closing(text, open, '(', ')') : brace;
        size_t const name = text.find(".entry", i) + 6;
        kernel.name = trim(text.substr(name, std::min(open, brace) - name));
        if (open < brace)
          for (std::string const& p : split(text.substr(open + 1, close - open - 2), ','))
            kernel.parameters.push_back(variable(p));
        performance_directives(kernel, text.substr(close, brace - close));
        Body(kernel).run(text.substr(brace + 1, body_end - brace - 2));
        module.kernels.push_back(std::move(kernel));
      }
      i = body_end;
      continue;
    }
    std::string const declaration = text.substr(i, semicolon - i);
    if (declaration.find(".shared") != std::string::npos) module.shared.push_back(variable(declaration));
    if (declaration.find(".global") != std::string::npos) module.global.push_back(variable(declaration));
    if (declaration.find(".const") != std::string::npos) module.constant.push_back(variable(declaration));
    i = semicolon + 1;
  }
  return module;
}

}  // namespace simulator

// Running a grid: which clusters are resident, which warp goes next, when asynchronous work arrives, and what to say
// when nothing moves any more.
#include "machine.h"

#include <algorithm>

namespace simulator {
namespace {

u32 volume(u32 const (&v)[3]) { return v[0] * v[1] * v[2]; }
void unflatten(u32 i, u32 const (&extent)[3], u32 (&out)[3]) {
  out[0] = i % extent[0];
  out[1] = i / extent[0] % extent[1];
  out[2] = i / (extent[0] * extent[1]);
}

constexpr u32 kMbarriersPerCta = 64;
// How long nothing may happen: rounds of the scheduler; the same where warps sleep; instructions where they compute.
constexpr u64 kIdleRounds = 2000, kSleepingRounds = 100000, kLongestLoop = 10000000;

u32 special_value(std::string const& name, Machine const& m, Cluster const& cluster, Cta const& cta, Warp const& w,
                  u32 lane) {
  Launch const& l = *m.launch;
  auto axis = [&](char const* prefix) {
    return name.compare(0, strlen(prefix), prefix) == 0 ? int(name.back() - 'x') : -1;
  };
  u32 const thread = w.index * kLanes + lane;
  if (int const i = axis("%tid."); i >= 0) {
    u32 at[3];
    unflatten(thread, l.block, at);
    return at[i];
  }
  if (int const i = axis("%ntid."); i >= 0) return l.block[i];
  if (int const i = axis("%ctaid."); i >= 0) return cta.index[i];
  if (int const i = axis("%nctaid."); i >= 0) return l.grid[i];
  if (int const i = axis("%clusterid."); i >= 0) return cluster.index[i];
  if (int const i = axis("%nclusterid."); i >= 0) return l.grid[i] / l.cluster[i];
  if (int const i = axis("%cluster_ctaid."); i >= 0) return cta.index[i] % l.cluster[i];
  if (int const i = axis("%cluster_nctaid."); i >= 0) return l.cluster[i];
  if (name == "%cluster_ctarank") return cta.rank;
  if (name == "%cluster_nctarank") return u32(cluster.ctas.size());
  if (name == "%laneid") return lane;
  if (name == "%warpid") return w.index;
  if (name == "%nwarpid") return 64;
  if (name == "%smid") return (cluster.index[0] + cta.rank) % m.settings.sms;
  if (name == "%nsmid") return m.settings.sms;
  if (name == "%lanemask_eq") return 1u << lane;
  if (name == "%lanemask_lt") return (1u << lane) - 1;
  if (name == "%lanemask_le") return (2u << lane) - 1;
  if (name == "%lanemask_gt") return ~((2u << lane) - 1);
  if (name == "%lanemask_ge") return ~((1u << lane) - 1);
  if (name == "%dynamic_smem_size") return l.dynamic_shared;
  if (name == "%total_smem_size") return l.dynamic_shared + l.program->shared_bytes;
  if (name == "%gridid") return 1;
  fail("unsupported", "special register %s", name.c_str());
}

}  // namespace

// Most work comes soon, some very late: what an unlucky machine might do.
u64 Machine::delay() { return 1 + (random() % 4 ? random() % 16 : random() % 1500); }

void Machine::later(Cluster const& cluster, std::function<void()> work) {
  if (!settings.adversarial) return work();
  events_.push_back({now + delay(), order_++, &cluster, std::move(work)});
}

void Machine::later_in_order(Cta& cta, std::function<void()> work) {
  if (!settings.adversarial) return work();
  cta.tensor_due = std::max(cta.tensor_due, now) + random() % 8;
  events_.push_back({cta.tensor_due, order_++, cta.cluster, std::move(work)});
}

void Machine::deliver(Cluster const* ending) {
  // Ties go by order: the tensor core's queue relies on it.
  while (true) {
    size_t best = events_.size();
    for (size_t i = 0; i < events_.size(); ++i) {
      if (ending ? events_[i].cluster != ending : events_[i].due > now) continue;
      if (best == events_.size() ||
          std::make_pair(events_[i].due, events_[i].order) < std::make_pair(events_[best].due, events_[best].order))
        best = i;
    }
    if (best == events_.size()) return;
    Event event = std::move(events_[best]);
    events_.erase(events_.begin() + long(best));
    ++progress;
    event.run();
  }
}

void Machine::take_cluster(u32 (&index)[3]) {
  Launch const& l = *launch;
  u32 const extent[3] = {l.grid[0] / l.cluster[0], l.grid[1] / l.cluster[1], l.grid[2] / l.cluster[2]};
  unflatten(next_cluster++, extent, index);
}

bool Machine::cancel_cluster(u32 out[3]) {
  if (next_cluster >= clusters) return false;
  u32 at[3];
  take_cluster(at);
  for (int i = 0; i < 3; ++i) out[i] = at[i] * launch->cluster[i];
  return true;
}

void Machine::start_warp(Cta& cta, u32 index) {
  Program const& p = *launch->program;
  Cluster& cluster = *cta.cluster;
  Warp& w = cta.warps[index];
  w.cta = &cta;
  w.index = index;
  w.agent = cta.rank * u32(cta.warps.size()) + index;
  cluster.agent_names[w.agent] = "warp " + std::to_string(index) + " of CTA " + std::to_string(cta.rank);
  w.storage = std::make_unique<u8[]>(p.register_bytes + 64);
  w.file = w.storage.get() + (64 - reinterpret_cast<uintptr_t>(w.storage.get()) % 64) % 64;
  w.written.assign(p.register_count, 0);
  w.clock.resize(cluster.agents);
  w.fence.resize(cluster.agents);
  w.observed.resize(cluster.agents);
  w.clock.seen[w.agent] = 1;
  w.counts.assign(p.code.size(), 0);
  u32 const threads = volume(launch->block), first = index * kLanes;
  u32 const mask = threads - first >= kLanes ? kAllLanes : (1u << (threads - first)) - 1;
  w.exited = ~mask;
  w.groups = {{mask, 0}};
  for (auto const& c : p.constants) {
    u64 bits = c.bits;
    if (c.base == Program::Base::kShared) bits += cta.rank << kRankShift;
    if (c.base == Program::Base::kParameters) bits += u64(launch->parameters.data());
    u8* out = w.file + c.value.offset;
    if (c.value.size == 0) memcpy(out, &bits, 4);
    for (int l = 0; c.value.size && l < kLanes; ++l) {
      memset(out + l * c.value.size, 0, c.value.size);
      memcpy(out + l * c.value.size, &bits, std::min(c.value.size, 8));
    }
    w.written[c.value.id] = kAllLanes;
  }
  for (auto const& [name, value] : p.special) {
    for (u32 l = 0; l < kLanes; ++l)
      reinterpret_cast<u32*>(w.file + value.offset)[l] = special_value(name, *this, cluster, cta, w, l);
    w.written[value.id] = kAllLanes;
  }
}

void Machine::start_cluster() {
  Launch const& l = *launch;
  auto cluster = std::make_unique<Cluster>();
  take_cluster(cluster->index);
  u32 const size = volume(l.cluster), warps = (volume(l.block) + kLanes - 1) / kLanes;
  u32 const room = std::min(kMbarriersPerCta, Stamp::kMaxAgents / size - warps - 1);
  cluster->next_agent = size * (warps + 1);
  cluster->agents = (size * (warps + 1 + room) + 15) / 16 * 16;
  cluster->agent_names.resize(cluster->agents);
  cluster->gathering.resize(cluster->agents);
  cluster->done.resize(cluster->agents);
  for (u32 r = 0; r < size; ++r) {
    cluster->ctas.push_back(std::make_unique<Cta>());
    Cta& cta = *cluster->ctas.back();
    cta.cluster = cluster.get();
    cta.rank = r;
    u32 within[3];
    unflatten(r, l.cluster, within);
    for (int i = 0; i < 3; ++i) cta.index[i] = cluster->index[i] * l.cluster[i] + within[i];
    u32 const bytes = std::max(l.program->dynamic_shared, kReservedShared + l.program->shared_bytes) + l.dynamic_shared;
    cta.shared.assign((bytes + 15) / 16 * 16, 0xcd);
    cta.shadow.resize(u32(cta.shared.size()));
    cta.tensor_agent = size * warps + r;
    cluster->agent_names[cta.tensor_agent] = "the tensor core of CTA " + std::to_string(r);
    for (NamedBarrier& b : cta.barriers) {
      b.gathering.resize(cluster->agents);
      b.done.resize(cluster->agents);
    }
    cta.warps.resize(warps);
    cta.live_warps = warps;
    cta.departed.resize(cluster->agents);
    // What a thread may have at most, since the PTX does not say what it gets.
    u32 const registers = l.program->kernel->max_registers ? l.program->kernel->max_registers
                                                           : std::min(255u, 65536 / (warps * kLanes)) / 8 * 8;
    cta.registers_used = registers * warps * kLanes;
    for (u32 i = 0; i < warps; ++i) {
      cta.warps[i].registers = registers;
      start_warp(cta, i);
    }
  }
  ++traffic.clusters;
  resident_.push_back(std::move(cluster));
}

namespace {

std::string where(Machine const& m, Warp const& w, u32 pc, u32 mask) {
  char text[256];
  Cta const& cta = *w.cta;
  snprintf(text, sizeof text, "\n  CTA (%u, %u, %u), rank %u, warp %u, lanes %#x, instruction %u: ", cta.index[0],
           cta.index[1], cta.index[2], cta.rank, w.index, mask, pc);
  auto const& statements = m.launch->program->kernel->statements;
  return text + (pc < statements.size() ? statements[pc].text : "end");
}

[[noreturn]] void not_written(Context const& c, u32 id) {
  auto const& registers = c.machine.launch->program->kernel->registers;
  std::string const name = id < registers.size() ? registers[id].name : "?";
  for (auto const& load : c.warp.tensor_loads)
    for (Value const& v : load.values)
      if (v.id == id)
        fail("in_flight", "register %s is the result of a tcgen05.ld without a tcgen05.wait::ld", name.c_str());
  if (c.warp.multiplies_into(id))
    fail("in_flight", "register %s is an accumulator of a wgmma without a wgmma.wait_group", name.c_str());
  if (!c.warp.tensor_loads.empty())
    fail("in_flight",
         "register %s is read and holds nothing yet: the warp has loads of tensor memory without a tcgen05.wait::ld",
         name.c_str());
  fail("uninitialised", "register %s is read and was never written (lanes %#x)", name.c_str(),
       c.mask & ~c.warp.written[id]);
}

bool merge(std::vector<LaneGroup>& groups) {
  bool met = false;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = i + 1; j < groups.size();) {
      if (groups[j].pc == groups[i].pc) {
        groups[i].mask |= groups[j].mask;
        groups.erase(groups.begin() + long(j));
        for (LaneGroup& g : groups) g.asleep = false;
        met = true;
      } else {
        ++j;
      }
    }
  }
  return met;
}

}  // namespace

bool Machine::run_slice(Cluster& cluster, Warp& w, int quantum) {
  Program const& program = *launch->program;
  u32 const* ids = program.ids.data();
  for (LaneGroup& g : w.groups) g.asleep = false;
  // Lanes that spin must not keep the others of their warp from going on.
  w.divided = w.groups.size() > 1 ? w.divided + 1 : 0;
  if (w.divided > 4 && w.divided % 2)
    std::min_element(w.groups.begin(), w.groups.end(), [](LaneGroup const& a, LaneGroup const& b) {
      return a.pc < b.pc;
    })->asleep = true;
  Context c{*this, cluster, *w.cta, w, nullptr, 0};
  u32 pc = 0;
  try {
    while (quantum > 0 && !w.groups.empty()) {
      // The group that is furthest behind goes first, so that lanes meet again.
      size_t chosen = w.groups.size();
      for (size_t i = 0; i < w.groups.size(); ++i)
        if (!w.groups[i].asleep && (chosen == w.groups.size() || w.groups[i].pc < w.groups[chosen].pc)) chosen = i;
      if (chosen == w.groups.size()) return false;
      bool const alone = w.groups.size() == 1;
      Step step = Step::kNext;
      do {
        c.group = &w.groups[chosen];
        pc = c.group->pc;
        Op const& op = program.code[pc];
        --quantum;
        c.mask = c.group->mask;
        u32 const* id = ids + op.ids;
        u32 written = kAllLanes;
        if (op.guard != kNone) {
          if ((w.written[id[0]] & c.mask) != c.mask) not_written(c, id[0]);
          u32 const guard = c.predicate(op.guard);
          c.mask &= op.guard_negated ? ~guard : guard;
          if (!c.mask) {
            ++w.counts[pc];
            ++traffic.instructions;
            ++c.group->pc;
            continue;
          }
        }
        for (int i = 0; i < op.reads; ++i) written &= w.written[id[i]];
        if (op.selects) {
          auto const of = [&w](u32 operand) { return operand == kNone ? kAllLanes : w.written[operand]; };
          u32 const first = op.immediate ? ~c.predicate(op.in[2]) : c.predicate(op.in[2]);
          written = w.written[id[op.reads - 1]] & ((of(op.selected[0]) & first) | (of(op.selected[1]) & ~first));
        }
        if (!op.moves_data && (written & c.mask) != c.mask)
          for (int i = 0; i < op.reads; ++i)
            if ((w.written[id[i]] & c.mask) != c.mask) not_written(c, id[i]);
        step = op.run(c, op);
        if (step == Step::kBlocked) break;
        ++w.counts[pc];
        ++traffic.instructions;
        for (int i = op.reads; i < op.reads + op.writes; ++i) {
          u32& mask = w.written[id[i]];
          mask = (mask & ~c.mask) | (written & c.mask);
        }
        if (step == Step::kNext) ++c.group->pc;
        if (step == Step::kYield) {
          ++c.group->pc;
          break;
        }
      } while (alone && quantum > 0 && w.groups.size() == 1 && w.groups[0].mask);
      if (step == Step::kBlocked || step == Step::kYield) w.groups[chosen].asleep = true;
      for (size_t i = 0; i < w.groups.size();) {
        if (w.groups[i].mask == 0)
          w.groups.erase(w.groups.begin() + long(i));
        else
          ++i;
      }
      if (w.groups.size() > 1 && merge(w.groups)) w.divided = 0;
    }
  } catch (Failure const& f) {
    throw Failure(f.category, f.what() + where(*this, w, pc, c.mask));
  }
  if (w.groups.empty()) {
    Cta& cta = *w.cta;
    --cta.live_warps;
    cta.departed.join(w.clock);
    if (w.cluster_arrived == cluster.generation) --cluster.arrived;  // it arrived without a wait: it counts no more
    ++progress;
    try {
      for (auto const& group : w.bulk_groups)
        if (!group->reads.empty())
          fail("in_flight",
               "a warp exits and has not waited for its bulk stores to read shared memory "
               "(cp.async.bulk.wait_group.read)");
      for (auto const& group : w.open_groups)
        if (group) fail("in_flight", "a warp exits with bulk stores that it never committed");
      if (!w.tensor_loads.empty()) fail("in_flight", "a warp exits with a tcgen05.ld that it has not waited for");
      if (!w.multiplications.empty() || !w.open_multiplications.results.empty())
        fail("in_flight", "a warp exits with a wgmma that it has not waited for");
      if (cta.live_warps == 0) {
        if (u32 const n = cta.tensor.allocated())
          fail("tensor_memory", "a CTA exits with %u columns of tensor memory allocated", n);
        if (cta.copies_in_flight)
          fail("in_flight", "a CTA exits while %u asynchronous copies write its shared memory", cta.copies_in_flight);
        cta.exited = true;
      }
    } catch (Failure const& f) {
      throw Failure(f.category, f.what() + where(*this, w, pc, c.mask));
    }
    finish_named_barriers(cta);
    finish_cluster_barrier(cluster);
  }
  return quantum <= 0;
}

void Machine::retire(Cluster& cluster) {
  size_t slot = 0;
  for (auto const& cta : cluster.ctas) {
    for (Warp const& w : cta->warps) {
      if (counts.size() <= slot) counts.push_back(std::vector<u64>(w.counts.size(), 0));
      if (counts[slot].size() < w.counts.size()) counts[slot].resize(w.counts.size(), 0);
      for (size_t i = 0; i < w.counts.size(); ++i) counts[slot][i] += w.counts[i];
      ++slot;
    }
  }
}

void Machine::report_deadlock() {
  std::string text = "no warp can go on\n";
  char line[512];
  auto const& statements = launch->program->kernel->statements;
  for (auto const& cluster : resident_) {
    for (auto const& cta : cluster->ctas) {
      for (Warp const& w : cta->warps) {
        for (LaneGroup const& g : w.groups) {
          snprintf(line, sizeof line, "  CTA (%u, %u, %u), rank %u, warp %u, lanes %#x at instruction %u: %s\n",
                   cta->index[0], cta->index[1], cta->index[2], cta->rank, w.index, g.mask, g.pc,
                   g.pc < statements.size() ? statements[g.pc].text.substr(0, 160).c_str() : "end");
          text += line;
          if (w.waits_on) {
            snprintf(line, sizeof line, "    waits for parity %u of the mbarrier at %#x\n", w.waits_on & 1,
                     w.waits_on & ~1u);
            text += line;
          }
        }
      }
      for (auto const& [offset, b] : cta->mbarriers) {
        if (b->pending == b->expected && b->bytes == 0) continue;
        snprintf(line, sizeof line,
                 "  mbarrier at %#x of rank %u: phase %llu, %u of %u arrivals missing, %lld bytes missing\n",
                 b->address, cta->rank, (unsigned long long)b->completed, b->pending, b->expected, (long long)b->bytes);
        text += line;
      }
      for (size_t i = 0; i < cta->barriers.size(); ++i) {
        NamedBarrier const& b = cta->barriers[i];
        if (!b.arrived) continue;
        snprintf(line, sizeof line, "  barrier %zu of rank %u: %u of %u threads\n", i, cta->rank, b.arrived,
                 b.needed ? b.needed : cta->live_warps * kLanes);
        text += line;
      }
    }
    if (cluster->arrived)
      text += "  the cluster's barrier has " + std::to_string(cluster->arrived) + " of " +
              std::to_string(cluster->live_warps()) + " warps\n";
  }
  throw Failure("deadlock", text);
}

void Machine::run(Launch const& l) {
  launch = &l;
  u32 const size = volume(l.cluster);
  clusters = volume(l.grid) / size;
  next_cluster = 0;
  resident_.clear();
  events_.clear();
  maps_written.clear();
  u32 const slots = std::max(1u, settings.sms / size);
  u64 idle_rounds = 0, start = traffic.instructions, last_progress = start;
  std::vector<std::pair<Cluster*, Warp*>> order;
  while (true) {
    while (resident_.size() < slots && next_cluster < clusters) start_cluster();
    if (resident_.empty()) break;
    order.clear();
    for (auto const& cluster : resident_)
      for (auto const& cta : cluster->ctas)
        for (Warp& w : cta->warps)
          if (!w.done()) order.push_back({cluster.get(), &w});
    if (settings.adversarial) std::shuffle(order.begin(), order.end(), random);
    u64 const before = progress;
    bool busy = false;
    slept = false;
    for (auto [cluster, w] : order) {
      if (!w->done()) busy |= run_slice(*cluster, *w, settings.adversarial ? 20 + int(random() % 400) : 4096);
      ++now;
      if (settings.adversarial) deliver();
    }
    for (size_t i = 0; i < resident_.size();) {
      if (resident_[i]->live_warps() == 0) {
        deliver(resident_[i].get());
        retire(*resident_[i]);
        resident_.erase(resident_.begin() + long(i));
        ++progress;
      } else {
        ++i;
      }
    }
    if (progress != before) {
      idle_rounds = 0;
      last_progress = traffic.instructions;
    } else {
      ++idle_rounds;
      if (!events_.empty()) {  // nothing to do but wait: skip to the next arrival
        u64 due = ~0ull;
        for (Event const& e : events_) due = std::min(due, e.due);
        now = std::max(now, due);
        deliver();
      } else {
        for (auto [cluster, w] : order) w->timed_out = true;  // a try_wait gives up now and then
        // A warp that computes for long looks like one that spins without a wait; it is given more time.
        if (idle_rounds > (slept ? kSleepingRounds : kIdleRounds) &&
            (!busy || traffic.instructions - last_progress > kLongestLoop))
          report_deadlock();
      }
    }
    if (traffic.instructions - start > settings.max_instructions)
      fail("deadlock", "more than %llu instructions: the kernel seems not to end",
           (unsigned long long)settings.max_instructions);
  }
}

}  // namespace simulator

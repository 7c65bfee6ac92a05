"""The scripts that run in Redis: each is one atomic step. No client of Redis lives here.

While Redis is out of memory it refuses the first write of a script that may take memory; later ones it allows, so that
no script stops halfway. Scripts flagged `no-writes` run even then, and on a replica (inside MULTI a full Redis 7.0
refuses reads, too). Scripts flagged `allow-oom` write even then: what they write takes no new memory.
"""

from importlib.resources import files

COMMIT = files(__package__).joinpath("commit.lua").read_text()
COMMIT_NOTHING = f"#!lua flags=allow-oom\n{COMMIT}"  # a commit without writes: only the leader's own fields change

# KEYS: leader. ARGV: time in ms; the attempt; if only an unchanged pulse may be followed: its epoch, and its commit
# or ''.
# An attempt is kept with the epoch that it got, since code from before there were attempts takes over without one.
LEAD = """#!lua flags=allow-oom
local stored = redis.pcall('HMGET', KEYS[1], 'epoch', 'commit', 'attempt')
if stored.err then return redis.error_reply(stored.err .. ': ' .. KEYS[1]) end
if stored[1] and stored[3] == stored[1] .. ' ' .. ARGV[2] then return stored[1] end -- repeated, its answer was lost
if ARGV[3] and (ARGV[3] ~= (stored[1] or '0') or ARGV[4] ~= (stored[2] or '')) then
  return redis.error_reply('FENCED another leader has taken over')
end
local epoch = string.format('%.0f', math.max(tonumber(stored[1] or '0') + 1, tonumber(ARGV[1])))
redis.call('HSET', KEYS[1], 'epoch', epoch, 'commit', 0, 'attempt', epoch .. ' ' .. ARGV[2])
return epoch
"""

# KEYS: leader. ARGV: epoch. A write that only counts: a WAIT after it waits for all that was written before.
TOUCH = """#!lua flags=allow-oom
if redis.call('HGET', KEYS[1], 'epoch') == ARGV[1] then redis.call('HINCRBY', KEYS[1], 'touched', 1) end
"""

# KEYS: leader. ARGV: epoch.
STEP_DOWN = """
if redis.call('HGET', KEYS[1], 'epoch') == ARGV[1] then redis.call('HDEL', KEYS[1], 'commit') end
"""

_FENCE = """
local epoch, mine = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0'), tonumber(ARGV[1])
if epoch > mine then return redis.error_reply('FENCED another leader has taken over') end
if epoch < mine then return redis.error_reply('LOST earlier commits') end
"""

# KEYS: leader, what was learned. ARGV: epoch, what was learned.
SAVE_LEARNED = f"{_FENCE} redis.call('SET', KEYS[2], ARGV[2])"

# KEYS: the set of requests with KV, the queues. Returns the members of each.
INDEX = """#!lua flags=no-writes
local members = {redis.pcall('SMEMBERS', KEYS[1])}
for i = 2, #KEYS do members[i] = redis.pcall('ZRANGE', KEYS[i], 0, -1) end
for i, found in ipairs(members) do
  if found.err then return redis.error_reply(found.err .. ': ' .. KEYS[i]) end
end
return members
"""

# KEYS: hash and log of each request. Returns for each its fields, or the error as a string, and its log, or the error
# in a list: one key of a wrong type must not keep the others from being read. Any other error is the answer to all.
READ = """#!lua flags=no-writes
local answers = {}
for i, key in ipairs(KEYS) do
  local is_log = i % 2 == 0
  local found = redis.pcall(is_log and 'GET' or 'HGETALL', key)
  local err = type(found) == 'table' and found.err
  if err and not string.find(err, '^WRONGTYPE') then return redis.error_reply(err) end
  if err then found = is_log and {err} or err end
  answers[i] = found
end
return answers
"""

# KEYS: leader, hash, log, the keys under which these two are kept, the set of kept ids, the set of requests with KV,
# the queues. ARGV: epoch, id, reason, seconds that an ended request is kept, seconds that an unreadable one is kept.
# RENAME takes a key of any type, so whatever is there is kept as it is. It also comes first because it needs no memory:
# once a script has written, Redis lets it go on to its end even if memory is full.
SET_ASIDE = f"""{_FENCE}
local hash, log, kept_hash, kept_log, kept = KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
if type(redis.pcall('HGET', hash, 'unreadable')) == 'string' then return end -- repeated, since its answer was lost
for from, to in pairs({{[hash] = kept_hash, [log] = kept_log}}) do
  if redis.call('EXISTS', from) == 1 then
    redis.call('RENAME', from, to)
    redis.call('EXPIRE', to, ARGV[5])
  end
end
redis.call('HSET', hash, 'unreadable', ARGV[3], 'ending', '')
redis.call('EXPIRE', hash, ARGV[4])
redis.call('SADD', kept, ARGV[2])
redis.call('EXPIRE', kept, ARGV[5])
redis.call('SREM', KEYS[7], ARGV[2])
for i = 8, #KEYS do redis.call('ZREM', KEYS[i], ARGV[2]) end
"""

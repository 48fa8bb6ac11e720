package journal

import (
	"maps"
	"slices"

	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// Claims returns all claims that have a record, readable or not, or may have one after a
// write that failed; ordered by UID.
func (j *Journal) Claims() holding.Claims {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.claims
	s.mu.RLock()
	defer s.mu.RUnlock()
	uids := maps.Clone(s.records)
	maps.Copy(uids, s.doubtful)
	for uid := range s.unreadable {
		uids[uid] = holding.Record{}
	}
	all := make(holding.Claims, 0, len(uids))
	for _, uid := range slices.Sorted(maps.Keys(uids)) {
		c, _ := j.claim(uid)
		all = append(all, c)
	}
	return all
}

// Claim returns the claim that Claims has; false if it has none of that UID.
func (j *Journal) Claim(uid string) (holding.Claim, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.claims.mu.RLock()
	defer j.claims.mu.RUnlock()
	return j.claim(uid)
}

// claim needs both locks.
func (j *Journal) claim(uid string) (holding.Claim, bool) {
	s := j.claims
	c := holding.Claim{Phase: j.phases[uid]}
	record, recorded := s.records[uid]
	written, doubtful := s.doubtful[uid]
	f, unreadable := s.unreadable[uid]
	switch {
	case doubtful && recorded:
		c.Record, c.State = record, holding.Doubtful
	case doubtful:
		c.Record, c.State = written, holding.Doubtful
	case recorded:
		c.Record = record
	case unreadable:
		c = unreadableClaim(uid, f)
		c.Phase = j.phases[uid]
	default:
		return holding.Claim{Record: holding.Record{ClaimUID: uid}}, false
	}
	return c, true
}

// unreadableClaim returns what is left of a claim's record.
func unreadableClaim(uid string, f file[holding.Record]) holding.Claim {
	return holding.Claim{Record: salvage(uid, f.data), State: holding.Unreadable, File: f.path, Err: f.err}
}

// unreadableClaims returns them in the order of their UIDs.
func unreadableClaims(files map[string]file[holding.Record]) holding.Claims {
	claims := make(holding.Claims, 0, len(files))
	for _, uid := range slices.Sorted(maps.Keys(files)) {
		claims = append(claims, unreadableClaim(uid, files[uid]))
	}
	return claims
}

// Put writes the claim's record, in place of any it has. When it returns nil the record is
// on disk. On an error the record before it, or none, still holds, except where the error
// comes from the last steps: then the claim is doubtful, and another Put or a Delete
// settles it. The claim's phase stays.
func (j *Journal) Put(r holding.Record) error {
	r.Holdings, r.Pods, r.RefusedClaims = slices.Clone(r.Holdings), slices.Clone(r.Pods), slices.Clone(r.RefusedClaims)
	return j.claims.put(r)
}

// Delete removes the claim's record and its renamed file, and then its phase. When it
// returns nil the removal is on disk; nil also when there is no record.
func (j *Journal) Delete(uid string) error {
	if err := j.claims.remove(uid); err != nil {
		return err
	}
	j.ResetPhase(uid)
	return nil
}

// AdvancePhase says that the claim's unprepare has come as far as this phase, or farther.
func (j *Journal) AdvancePhase(uid string, to holding.Phase) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.phases[uid] = max(j.phases[uid], to)
}

// ResetPhase says that the claim is prepared again.
func (j *Journal) ResetPhase(uid string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.phases, uid)
}

# Sourced by test.sh and demo.sh. After `verdict NAME` the last line of a script is NAME PASSED, with status 0, where it
# came as far as `passed`, and NAME FAILED, with another status, wherever else it ends: bash runs the EXIT trap of a
# script that is killed too, and $? is then that of the last command that ended, which may well have gone well.

verdict() {
    VERDICT=$1 COMPLETE=false
    trap finish EXIT
    # TERM and HUP end the script at once, and `finish` ends the command it waits for. INT needs a trap, or it would go
    # unnoticed where that command handles it and ends well; bash runs the trap once the command has ended, and a
    # terminal sends INT to the command too.
    trap 'exit 130' INT
}

passed() {
    COMPLETE=true
}

# throw_away PID...: remove the environment of setup_throw_away, if there is one, once these, which were killed and may
# write to it, have ended.
throw_away() {
    local pid tries=100
    [[ -n ${THROW_AWAY-} ]] || return 0
    for pid in "$@"; do
        while kill -0 "$pid" 2>/dev/null && ((tries-- > 0)); do sleep 0.1; done
    done
    rm -rf "$THROW_AWAY"
}

finish() {
    local status=$? children=()
    trap '' INT TERM HUP
    if $COMPLETE && ((status == 0)); then
        throw_away
        echo "$VERDICT PASSED"
        exit 0
    fi
    read -r -a children 2>/dev/null <"/proc/$$/task/$$/children" || true
    ((${#children[@]} == 0)) || kill "${children[@]}" 2>/dev/null || true
    throw_away "${children[@]}"
    echo "$VERDICT FAILED" || true # the terminal may be gone
    exit $((status == 0 ? 1 : status))
}

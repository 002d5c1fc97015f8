package com.example.chat

import androidx.compose.foundation.layout.Arrangement
import androidx.compose.foundation.layout.Column
import androidx.compose.foundation.layout.Row
import androidx.compose.foundation.layout.fillMaxSize
import androidx.compose.foundation.layout.fillMaxWidth
import androidx.compose.foundation.layout.imePadding
import androidx.compose.foundation.layout.padding
import androidx.compose.foundation.layout.widthIn
import androidx.compose.foundation.lazy.LazyColumn
import androidx.compose.foundation.lazy.items
import androidx.compose.foundation.lazy.rememberLazyListState
import androidx.compose.foundation.text.KeyboardActions
import androidx.compose.foundation.text.KeyboardOptions
import androidx.compose.foundation.text.selection.SelectionContainer
import androidx.compose.material3.Button
import androidx.compose.material3.FilterChip
import androidx.compose.material3.MaterialTheme
import androidx.compose.material3.OutlinedTextField
import androidx.compose.material3.Scaffold
import androidx.compose.material3.Surface
import androidx.compose.material3.Text
import androidx.compose.material3.TextButton
import androidx.compose.runtime.Composable
import androidx.compose.runtime.LaunchedEffect
import androidx.compose.runtime.getValue
import androidx.compose.runtime.mutableStateOf
import androidx.compose.runtime.saveable.rememberSaveable
import androidx.compose.runtime.setValue
import androidx.compose.ui.Alignment
import androidx.compose.ui.Modifier
import androidx.compose.ui.text.input.ImeAction
import androidx.compose.ui.unit.dp

/** What a person may do. [speak] writes what is said into the field, or with a model that hears, into the conversation. */
class Actions(
    val ask: (String, Mode) -> Unit,
    val cancel: () -> Unit,
    val picture: () -> Unit,
    val speak: (dictated: (String) -> Unit) -> Unit,
)

@Composable
fun ChatScreen(screen: Screen, actions: Actions) = Scaffold { bars ->
    Column(Modifier.fillMaxSize().padding(bars).imePadding().padding(horizontal = 16.dp, vertical = 8.dp)) {
        Turns(screen.turns, Modifier.weight(1f))
        Text(screen.status, style = MaterialTheme.typography.bodySmall)
        Composer(screen, actions)
    }
}

@Composable
private fun Turns(turns: List<Turn>, modifier: Modifier) {
    val list = rememberLazyListState()
    val end = turns.lastOrNull()?.text?.length ?: 0
    LaunchedEffect(turns.size, end) { // follows the text, unless a person has scrolled up to read
        if (turns.isNotEmpty() && !list.isScrollInProgress) list.scrollToItem(turns.lastIndex, Int.MAX_VALUE / 2)
    }
    LazyColumn(modifier.fillMaxWidth(), list, verticalArrangement = Arrangement.spacedBy(8.dp)) {
        items(turns) { turn -> TurnView(turn) }
    }
}

@Composable
private fun TurnView(turn: Turn) {
    val colors = MaterialTheme.colorScheme
    val mine = turn.by == Turn.By.PERSON
    val color = when (turn.by) {
        Turn.By.PERSON -> colors.primaryContainer
        Turn.By.MODEL -> colors.surfaceVariant
        Turn.By.APP -> colors.tertiaryContainer
    }
    Row(Modifier.fillMaxWidth(), if (mine) Arrangement.End else Arrangement.Start) {
        Surface(color = color, shape = MaterialTheme.shapes.large) {
            SelectionContainer {
                Column(Modifier.widthIn(max = 320.dp).padding(12.dp)) {
                    Text(turn.text)
                    for ((label, value) in turn.fields) {
                        Row {
                            Text(label, Modifier.weight(1f), style = MaterialTheme.typography.labelLarge)
                            Text(value, Modifier.weight(2f))
                        }
                    }
                }
            }
        }
    }
}

@Composable
private fun Composer(screen: Screen, actions: Actions) {
    var question by rememberSaveable { mutableStateOf("") }
    var mode by rememberSaveable { mutableStateOf(Mode.CHAT) }
    val ready = screen.phase == Screen.Phase.READY

    fun send() {
        if (!ready || question.isBlank()) return
        actions.ask(question, mode)
        question = ""
    }
    Row(horizontalArrangement = Arrangement.spacedBy(8.dp), verticalAlignment = Alignment.CenterVertically) {
        if (screen.modes.size > 1) {
            for (each in screen.modes) FilterChip(mode == each, { mode = each }, { Text(label(each)) })
        }
        if (screen.sees) TextButton(actions.picture, enabled = ready) { Text(if (screen.picture) "1 picture" else "Picture") }
        TextButton({ actions.speak { question += it } }, enabled = ready) { Text("Speak") }
    }
    Row(horizontalArrangement = Arrangement.spacedBy(8.dp), verticalAlignment = Alignment.CenterVertically) {
        OutlinedTextField(
            question,
            { question = it },
            Modifier.weight(1f),
            enabled = !screen.hears,
            placeholder = { Text(hint(mode)) },
            keyboardOptions = KeyboardOptions(imeAction = ImeAction.Send),
            keyboardActions = KeyboardActions(onSend = { send() }),
            maxLines = 4,
        )
        when (screen.phase) {
            Screen.Phase.ANSWERING -> Button(actions.cancel) { Text("Stop") }
            Screen.Phase.LOADING -> Button({}, enabled = false) { Text("Loading") }
            else -> Button(::send, enabled = ready && question.isNotBlank()) { Text("Send") }
        }
    }
}

private fun label(mode: Mode) = mode.name.lowercase().replaceFirstChar { it.uppercase() }

private fun hint(mode: Mode) = when (mode) {
    Mode.CHAT -> "Question"
    Mode.TIMER -> "Wake me in 20 minutes"
    Mode.FORM -> "A table for 4 on Friday, for Ada"
}

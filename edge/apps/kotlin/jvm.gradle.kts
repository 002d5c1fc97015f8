// The Kotlin API for desktop JVMs: copy this folder into a project, and add include(":edge") to its settings.gradle.kts.
plugins {
    kotlin("jvm")
}

dependencies {
    api("org.jetbrains.kotlinx:kotlinx-coroutines-core:1.8.1")
}
